"""The benchmarks run and print their ratios. What the ratios are is for no test to say."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.__main__ import SIZES as SIZE_NAMES
from benchmarks.environment import HERE, Filled
from benchmarks.event_mix import length, training
from benchmarks.measure import Noise, Rounds, Row, percentile, ratio, spread, taking_turns
from benchmarks.original_design import CountingMonitor, FilePoller
from benchmarks.report import BEGIN, END, DocumentPlace, Machine, PageBroken, Report, keep
from tests.support.errors import raises
from trinity_events.core import Monitor, MonitorState
from trinity_events.errors import DeadlineExceeded
from trinity_schemas import decode_envelope

ALWAYS_RUN = ("latency", "fold", "rollouts", "weights")


@pytest.fixture(scope="module")
def running(request):
    """Run the chosen benchmarks at their smallest, two at a time: no test is of their times."""
    tests = [
        item for item in request.session.items if "running" in getattr(item, "fixturenames", ())
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {
            test.callspec.params["name"]: pool.submit(run_tiny, test.callspec.params["name"])
            for test in tests
        }


def run_tiny(name):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--size", "tiny"],
        cwd=HERE,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        name if name in ALWAYS_RUN else pytest.param(name, marks=pytest.mark.nightly)
        for name in BENCHMARKS
    ],
)
def test_a_benchmark_runs_and_prints_its_ratios(name, running):
    if name.startswith("megatron_"):
        pytest.importorskip("megatron.core")
    missing = getattr(BENCHMARKS[name], "missing", lambda: None)
    if why := missing():
        pytest.skip(why)
    done = running[name].result()
    assert done.returncode == 0, done.stderr
    assert f"{name}: {BENCHMARKS[name].TITLE}" in done.stdout
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    ratios = [cells[5].strip() for cells in rows if cells[3].strip()]
    assert ratios
    for shown in ratios:
        float(shown)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_every_size_and_says_how_long_it_takes(name):
    assert tuple(BENCHMARKS[name].SIZES) == SIZE_NAMES
    assert all(size.takes for size in BENCHMARKS[name].SIZES.values())


def test_a_name_that_is_no_benchmark_is_refused_with_those_that_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "speed"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "there is no speed: choose of latency, fold" in capsys.readouterr().err


def test_the_mix_is_a_run_without_an_anomaly_whose_every_step_becomes_ready():
    monitor, steps = Monitor(MonitorState(run_id="mix")), 20
    payloads = [payload for payload, _ in zip(training("mix"), range(length(steps)), strict=False)]
    for number, payload in enumerate(payloads):
        monitor.apply(f"{number + 1}-0", decode_envelope(payload))
    assert monitor.state.anomaly_counts == {}
    assert monitor.state.ready["weights"].at.step == steps
    assert monitor.state.ready["checkpoint"].at.step == steps
    assert b"version-opened" in next(
        payload for number, payload in enumerate(training("mix")) if number == len(payloads)
    )


def test_an_entry_of_a_filled_log_is_found_by_its_id_again():
    filled = Filled(entries=1234, bytes=0, first_ms=1_700_000_000_000)
    assert [filled.index_of(filled.id_of(at)) for at in (0, 99, 100, 1233)] == [0, 99, 100, 1233]
    assert filled.last_id == "1700000000012-33"


def test_contenders_take_turns_at_going_first():
    order = []

    def contender(name):
        return lambda: order.append(name) or 1.0

    timings = taking_turns({name: contender(name) for name in "ab"}, 2, Noise())
    assert order == ["a", "b", "b", "a"]
    assert timings == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_a_ratio_is_taken_round_by_round():
    # The second round saw a machine at half its speed; its ratio is what counts.
    assert ratio([10, 5, 10], [20, 10, 20]) == 0.5
    assert ratio([10, 4, 30], [20, 10, 20]) == 0.5


def test_percentiles_and_spread_are_those_of_the_values():
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([7.0], 0.99) == 7.0
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert spread([1.0]) is None


def test_what_is_asked_is_met_or_missed():
    assert Rounds("at least", 0.6).met_by(0.6) and not Rounds("at least", 0.6).met_by(0.59)
    assert Rounds("at most", 3).met_by(3) and not Rounds("at most", 3).met_by(3.1)


def test_the_model_of_the_original_shows_a_step_once_its_last_save_is_counted(tmp_path):
    file = tmp_path / "latest.txt"
    monitor = CountingMonitor(str(file))
    monitor.register(3, 2)
    began = time.perf_counter()
    with FilePoller(file, every=0.01) as poller:
        monitor.finished(3)
        assert not file.exists()
        monitor.finished(3)
        assert poller.wait_for(3) > began
        with raises(DeadlineExceeded, missing=f"step 4 was not in {file}", deadline=0.05):
            poller.wait_for(4, deadline=0.05)


def report(name: str = "fold", ratio: float = 0.5) -> Report:
    row = Row(
        what="ours", figure="1/s", peer="theirs", peer_figure="2/s", ratio=ratio,
        target=Rounds("at least", 0.6), spread=0.1,
    )  # fmt: skip
    machine = Machine(cores=2, python="3.11.7", server="Valkey 9.1.2", load=0.1)
    return Report(
        name=name, title="a title", size="full", rows=[row], notes=["A note."],
        machine=machine, noise=0.05, seconds=3.0,
    )  # fmt: skip


def test_what_is_kept_is_on_the_page_between_its_markers_and_in_a_file(tmp_path):
    page, folder = tmp_path / "speed.md", tmp_path / "figures"
    page.write_text(f"before\n{BEGIN}\nstale figures\n{END}\nafter\n")
    keep(report("growth"), DocumentPlace(page, folder))
    keep(report("fold"), DocumentPlace(page, folder))
    keep(report("fold", ratio=0.7), DocumentPlace(page, folder))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "stale" not in text
    assert text.index("### fold: a title") < text.index("### growth: a title")
    assert "| ours | 1/s | theirs | 2/s | 0.7 | at least 0.6 | 10% |" in text
    assert "| 0.5 | at least 0.6 (missed) | 10% |" in text
    assert "2 cores, Python 3.11.7, Valkey 9.1.2; load 0.1" in text
    stored = msgspec.json.decode((folder / "fold.json").read_bytes(), type=Report)
    assert stored == report("fold", ratio=0.7)


def test_a_page_without_the_markers_is_left_alone(tmp_path):
    page = tmp_path / "speed.md"
    page.write_text("nothing to replace\n")
    with raises(PageBroken, fault="markers", page=page):
        keep(report(), DocumentPlace(page, tmp_path / "figures"))
    assert not (tmp_path / "figures").exists()
