"""Metrics of a run by step, from its events."""

import msgspec
import pytest

from tests.support.event_histories import DIGEST, History, committed, opened, part
from trinity_events.analysis.metrics import MetricsReader, format_metric_name
from trinity_schemas import AppliedPhases, StepRef, StepTrained, WeightsApplied


def metrics_of(history):
    reader = MetricsReader()
    readings = [reader.add(envelope) for _, envelope in history.entries]
    return [(reading.step, reading.values) for reading in readings if reading is not None]


def applied(step, pause):
    phases = AppliedPhases(fetch=0.1, pause=pause)
    return WeightsApplied(
        version=StepRef(1, step), digest=DIGEST, bytes=8, verified_at=1.5, phases=phases
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("loss", "train/loss"),
        ("critic/vf_loss", "train/critic/vf_loss"),
        ("reward", "rollout/reward"),
        ("rollout_corr/kl", "off_policy/kl"),
        ("mixed_versions", "off_policy/mixed_versions"),
        ("eval/sums", "eval/sums"),
    ],
)
def test_each_metric_has_one_group(name, shown):
    assert format_metric_name(name) == shown


def test_a_trained_step_tells_its_metrics_and_the_staleness_of_its_samples():
    history = History()
    history.add(
        StepTrained(
            step=1,
            trained=((0, 1),),
            dropped={"filtered": ((2, 4),)},
            staleness={0: 3, 2: 1},
            metrics={"loss": 0.5},
        )
    )
    assert metrics_of(history) == [
        (
            1,
            {
                "train/loss": 0.5,
                "rollout/dropped_prompts": 3.0,
                "off_policy/staleness": 0.5,
                "off_policy/staleness_max": 2.0,
            },
        )
    ]


def test_the_time_of_a_step_is_told_within_one_epoch_only():
    history = History()
    for step, epoch in ((1, 1), (2, 1), (2, 2), (3, 2)):
        history.add(StepTrained(step=step), epoch=epoch)
    assert metrics_of(history) == [(2, {"perf/step_seconds": 0.0}), (3, {"perf/step_seconds": 0.0})]


def test_a_version_tells_its_size_and_the_stall_of_its_slowest_rank():
    history = History()
    history.add(opened(1, 0, 1))
    slow = part(1, 1)
    for event in (part(1, 0), slow):
        history.add(event, rank=event.rank)
    history.add(committed(1, "weights"))
    [(step, values)] = metrics_of(history)
    assert (step, values["perf/published_bytes"]) == (1, 2.0 * slow.bytes)
    assert values["perf/stall_seconds"] == slow.seconds


def committed_with(step, metrics):
    return msgspec.structs.replace(committed(step, "weights"), metrics=metrics)


def test_a_loop_that_commits_its_metrics_has_them_and_a_trainer_has_them_once():
    history = History()
    history.add(committed_with(1, {"loss": 0.5, "rollout/reward": 1.0}))
    history.add(committed_with(2, {}))
    history.add(StepTrained(step=1, metrics={"loss": 0.25}), epoch=2)
    history.add(committed_with(1, {"loss": 0.25}), epoch=2)
    assert metrics_of(history) == [
        (1, {"train/loss": 0.5, "rollout/reward": 1.0}),
        (1, {"train/loss": 0.25}),
    ]


def test_an_applied_version_tells_the_pause_and_the_time_since_it_was_opened():
    history = History()
    history.add(opened(1, 0))
    history.add(applied(1, pause=0.25), by="explorer")
    assert metrics_of(history) == [(1, {"perf/pause_seconds": 0.25, "perf/transfer_seconds": 0.5})]


def test_a_version_that_an_explorer_goes_back_to_is_no_transfer():
    history = History()
    for step in (1, 2):
        history.add(opened(step))
    for step in (1, 2, 1, 2):  # the third for an evaluation, the fourth for training again
        history.add(applied(step, pause=0.1), by="explorer")
    history.add(applied(2, pause=0.1), by="explorer", rank=1)
    with_transfer = ["perf/transfer_seconds" in values for _, values in metrics_of(history)]
    assert with_transfer == [True, True, False, False, True]
