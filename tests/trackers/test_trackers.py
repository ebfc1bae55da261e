"""Trackers of experiments: what each wrote is read with the tracker's own reader."""

import json
import logging
import os
import re
import struct

import pytest

from tests.support.errors import raises
from tests.support.waits import PATIENCE
from trinity_events.analysis.metrics import StepMetrics
from trinity_events.trackers import TrackedRun, TrackerUnusable, find_tracker, open_trackers
from trinity_events.trackers.follow import track_live
from trinity_schemas import RunClosed, StepTrained

LEVELDB_BLOCK = 32 * 1024
REWARDS = {1: 0.25, 2: 0.5, 3: 1.0}


async def publish(publisher, steps=REWARDS):
    for step in steps:
        metrics = {"loss": 1.0 / step, "reward": REWARDS[step], "acc@8": REWARDS[step]}
        await publisher.publish(StepTrained(step=step, staleness={1: 4}, metrics=metrics))


def tracked(folder, resumed_after=None):
    return TrackedRun(
        run_id="run-1",
        folder=folder,
        project="checks",
        config='{"steps": 3}',
        resumed_after=resumed_after,
    )


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
async def given(cli, publisher, run_id, tmp_path):
    """Let the command give a run's metrics to every tracker; return what it printed."""
    for library in ("mlflow", "tensorboard", "tensorboardX", "wandb"):
        pytest.importorskip(library)
    await publish(publisher)
    trackers = ("jsonl", "tensorboard", "wandb", "mlflow")
    shown = cli(
        "track",
        run_id,
        *(word for name in trackers for word in ("--to", name)),
        "--folder",
        str(tmp_path),
        "--project",
        "checks",
        timeout=PATIENCE,
        env={
            **os.environ,
            "WANDB_MODE": "offline",
            "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
            "MLFLOW_ALLOW_FILE_STORE": "true",
        },
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


async def test_every_tracker_gets_a_runs_metrics_by_step(given, run_id, tmp_path, monkeypatch):
    assert "3 measurements given to jsonl, tensorboard, wandb, mlflow" in given

    lines = lines_of(tmp_path / f"{run_id}.metrics.jsonl")
    assert {line["step"]: line["values"]["rollout/reward"] for line in lines} == REWARDS
    assert {line["step"]: line["values"]["train/acc@8"] for line in lines} == REWARDS

    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "tensorboard" / run_id)).Reload()
    assert {point.step: point.value for point in events.Scalars("rollout/reward")} == REWARDS
    assert {point.step: point.value for point in events.Scalars("train/acc_at_8")} == REWARDS
    assert events.Scalars("off_policy/staleness")[0].value == 1.0

    assert wandb_values(tmp_path, "rollout/reward") == REWARDS
    assert wandb_values(tmp_path, "train/acc@8") == REWARDS

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient(f"file:{tmp_path}/mlruns")
    experiment = client.get_experiment_by_name("checks")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.data.tags["trinity.run"] == run_id
    for name in ("rollout/reward", "train/acc_at_8"):
        history = client.get_metric_history(run.info.run_id, name)
        assert {point.step: point.value for point in history} == REWARDS


def wandb_values(folder, name):
    """Return a metric by step from the file of Weights & Biases' offline run."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    [path] = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    values = {}
    for payload in leveldb_records(path.read_bytes()):
        record = records.Record()
        record.ParseFromString(payload)
        row = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        if name in row:
            values[row["step"]] = row[name]
    return values


def leveldb_records(content):
    """Yield the records of a log in LevelDB's format, whose header has 7 bytes.

    A record is in one piece (type 1), or in a first, middle and last piece (2, 3, 4).
    """
    place, parts = 7, []
    while place + 7 <= len(content):
        remaining = LEVELDB_BLOCK - place % LEVELDB_BLOCK
        if remaining < 7:
            place += remaining
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        parts.append(content[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


async def test_a_live_run_is_tracked_until_it_is_closed(publisher, redis_url, run_id, tmp_path):
    await publish(publisher)
    await publisher.publish(RunClosed(reason="finished", step=3))
    with open_trackers(["jsonl"], tracked(tmp_path)) as trackers:
        await track_live(run_id, publisher.epoch, trackers, redis_url=redis_url)
    lines = lines_of(tmp_path / "run-1.metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]


async def test_a_tracker_that_fails_leaves_the_others_alone(
    publisher, redis_url, run_id, tmp_path, caplog
):
    class Failing:
        calls = 0

        def log(self, metrics):
            self.calls += 1
            raise RuntimeError("its server is gone")

        def close(self):
            pass

    await publish(publisher)
    await publisher.publish(RunClosed(reason="finished", step=3))
    failing = Failing()
    with open_trackers(["jsonl"], tracked(tmp_path)) as trackers:
        both = {"failing": failing, **trackers}
        with caplog.at_level(logging.WARNING):
            await track_live(run_id, publisher.epoch, both, redis_url=redis_url)
    assert failing.calls == 1
    assert "tracker failing gets nothing more: its server is gone" in caplog.text
    assert len(lines_of(tmp_path / "run-1.metrics.jsonl")) == 3


@pytest.fixture
def mlflow_runs(tmp_path, monkeypatch):
    """Log metrics by MLflow; return the values of each name that arrived."""
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")

    def log(*steps, **options):
        from trinity_events.trackers.mlflow import MLflow

        tracker = MLflow(tracked(tmp_path), **options)
        for step, values in enumerate(steps, 1):
            tracker.log(StepMetrics(1, step, 1e9 + step, values))
        tracker.close()
        client = tracking.MlflowClient()
        experiment = client.get_experiment_by_name("checks")
        [run] = client.search_runs([experiment.experiment_id])
        return {
            name: [point.value for point in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }

    return log


def test_a_metric_whose_name_mlflow_refuses_arrives_under_another_one(mlflow_runs):
    names = ("train/acc@8", "train/a, b", "/train//x/../y", "train/gr\u00f6\u00dfe")
    series = mlflow_runs(*[dict.fromkeys(names, 0.5) | {"train/loss": 1.0}] * 2)
    assert series.keys() == {
        *("train/acc_at_8", "train/a_ b", "train/x/y", "train/gr\u00f6\u00dfe", "train/loss")
    }
    assert all(len(values) == 2 for values in series.values())


def test_a_metric_that_mlflow_cannot_take_costs_no_other_one(mlflow_runs, caplog):
    refused = ("train/acc_at_8", "train/" + "x" * 300, "train/loss/part")
    step = {"train/acc@8": 0.5, "train/loss": 1.0} | dict.fromkeys(refused, 2.0)
    with caplog.at_level(logging.WARNING):
        series = mlflow_runs(*[step | {"train/other": 3.0}] * 3)
    assert series == {
        "train/acc_at_8": [0.5] * 3,
        "train/loss": [1.0] * len(series["train/loss"]),
        "train/other": [3.0] * len(series["train/other"]),
    }
    warned = [message for message in caplog.messages if "is left out of MLflow" in message]
    assert [name for message in warned for name in refused if repr(name) in message] == sorted(
        refused, key=[*step].index
    ), "each is warned of once"


def test_more_metrics_than_fit_into_one_call_arrive(mlflow_runs):
    metrics = {f"train/{number}": 1.0 for number in range(5)}
    assert len(mlflow_runs(metrics, most_metrics=2)) == 5


def test_a_resumed_run_appends_lines_and_purges_steps_that_do_not_stand(tmp_path):
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for epoch, resumed_after, steps in ((1, None, (1, 2, 3)), (2, 1, (2,))):
        run = tracked(tmp_path, resumed_after)
        with open_trackers(["jsonl", "tensorboard"], run) as trackers:
            for step in steps:
                values = {"train/loss": float(epoch), "train/a@b": 1.0, "train/a_at_b": 2.0}
                metrics = StepMetrics(epoch, step, 1e9 + step, values)
                for tracker in trackers.values():
                    tracker.log(metrics)
    assert [line["step"] for line in lines_of(tmp_path / "run-1.metrics.jsonl")] == [1, 2, 3, 2]
    events = reader.EventAccumulator(str(tmp_path / "tensorboard" / "run-1")).Reload()
    losses = {point.step: point.value for point in events.Scalars("train/loss")}
    assert losses == {1: 1.0, 2: 2.0}
    assert [point.value for point in events.Scalars("train/a_at_b")] == [1.0] * 2, "of one metric"


def test_an_unknown_tracker_is_refused_with_the_nearest_name():
    with raises(
        TrackerUnusable, tracker="tensorbord", fault="unknown", reason=re.compile("tensorboard")
    ):
        find_tracker("tensorbord")


def test_a_tracker_of_ones_own_is_found_by_module_and_attribute():
    own = find_tracker("trinity_events.trackers.jsonl:JsonLines")
    assert own is find_tracker("jsonl")
    with raises(TrackerUnusable, fault="loading"):
        find_tracker("trinity_events.trackers.jsonl:Nothing")
