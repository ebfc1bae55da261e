"""``trinity-events goodput``, and what metrics and dashboard show of it."""

import json

import pytest

from trinity_events.core import Monitor, MonitorState
from trinity_events.dashboard import queries
from trinity_events.dashboard.series import Figures
from trinity_events.diagnostics.phases import PhaseClock, PhaseReports
from trinity_events.log import AsyncPublisher, new_producer
from trinity_events.replay import fold_one
from trinity_events.views.metrics import RunMetrics
from trinity_schemas import PhasesMeasured, RunClosed, StepTrained, decode_envelope


@pytest.fixture
async def measured_run(log, publisher):
    """A closed run of a trainer and a rank that told their phases."""
    rank = AsyncPublisher(log, publisher.epoch, new_producer("actor", 0))
    times = {"training": 6.0, "waiting-trainer": 4.0}
    driver = {"training": 6.0, "waiting-rollouts": 4.0}
    await publisher.publish(
        StepTrained(step=1, tokens={"trained": 75, "stale": 25}, staleness={0: 4})
    )
    for sender, seconds, cores in ((rank, times, 2), (publisher, driver, 0)):
        await sender.publish(
            PhasesMeasured(seconds=seconds, phase="training", cores=cores, is_last=True)
        )
    await publisher.publish(RunClosed(reason="finished"))
    return log


async def test_it_prints_where_seconds_and_tokens_went(cli, measured_run, run_id):
    shown = cli("goodput", run_id)
    assert (shown.returncode, shown.stderr) == (0, "")
    first, *_ = shown.stdout.splitlines()
    assert first == (
        f"run {run_id}: 60.0% of 10 worker-seconds were productive, "
        "and 75.0% of 100 sampled tokens were trained on"
    )
    rows = {line.split("  ")[0]: line.split() for line in shown.stdout.splitlines() if line}
    assert rows["waiting for rollouts"][-3:] == ["40.0%", "40.0%", "40.0%"]
    assert rows["seconds"] == ["seconds", "10.0", "10.0", "20.0"]
    assert rows["stale"] == ["stale", "25", "25.0%"]


async def test_a_file_gives_the_same_document_as_the_server(cli, measured_run, run_id, tmp_path):
    file = tmp_path / "run.jsonl"
    assert cli("export", run_id, "--output", str(file)).returncode == 0
    documents = [json.loads(cli("goodput", name, "--json").stdout) for name in (run_id, str(file))]
    assert documents[0] == documents[1]
    assert documents[0]["seconds"] == {"training": 12.0, "waiting-rollouts": 8.0}
    assert documents[0]["samples"] == 4


async def test_a_run_without_reports_says_so(cli, publisher, run_id):
    shown = cli("goodput", run_id)
    assert shown.stdout == f"run {run_id}: its processes have reported no times\n"


async def test_metrics_and_dashboard_show_it(measured_run, run_id):
    metrics, figures = RunMetrics(run_id), Figures()
    monitor = Monitor(MonitorState(run_id=run_id))
    for entry in await measured_run.read():
        metrics.update(monitor.state, [fold_one(monitor, entry)], 0)
    value = metrics.registry.get_sample_value
    assert value("trinity_goodput_ratio", {"run": run_id}) == pytest.approx(0.6)
    assert value("trinity_worker_seconds", {"run": run_id, "fate": "training"}) == 12.0
    assert value("trinity_sampled_tokens", {"run": run_id, "fate": "stale"}) == 25
    for entry in await measured_run.read():
        figures.add(int(entry.id.split("-")[0]) / 1000, decode_envelope(entry.payload))
    panel = queries.build_goodput(figures.goodput, 0.0)
    assert panel["roles"]["ranks"] == [
        ["training", "training", 0.6],
        ["waiting for rollouts", "waiting-rollouts", pytest.approx(0.4)],
    ]
    assert panel["tokens"] == [("trained", 75), ("stale", 25)]


def test_a_process_reports_at_its_start_and_at_its_end():
    reports = []
    clock = PhaseClock()
    with PhaseReports(clock, reports.append, cores=2), clock.phase("training"):
        clock.end_start()
    assert [report.is_last for report in reports] == [False, True]
    assert reports[-1].cores == 2
    assert {"starting", "training"} <= reports[-1].seconds.keys()
