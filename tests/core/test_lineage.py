"""Versions stand while the lineage holds their epoch and step."""

from __future__ import annotations

import pytest

from tests.support.event_histories import History
from trinity_events.core.lineage import is_in_lineage, lineage_spans
from trinity_schemas import RunOpened, RunResumed, StepRef, TrainerStatusChanged


def state_after(*openings):
    history = History()
    for epoch, opening in enumerate(openings, 2):
        history.add(TrainerStatusChanged(status="running", step=20), epoch=epoch - 1)
        history.add(opening, epoch=epoch)
    return history.fold()[0].state


def resumed(step: int, epoch: int | None = None) -> RunResumed:
    return RunResumed(step=step, checkpoint=None if epoch is None else StepRef(epoch, step))


@pytest.mark.parametrize(
    ("openings", "lineage"),
    [
        ([], [(1, 0, None)]),
        ([resumed(4, 1)], [(1, 0, 4), (2, 4, None)]),
        ([resumed(4, 1), resumed(8, 2)], [(1, 0, 4), (2, 4, 8), (3, 8, None)]),
        # The checkpoint of epoch 1 again: epoch 2 wrote none, and is discarded.
        ([resumed(4, 1), resumed(4, 1)], [(1, 0, 4), (3, 4, None)]),
        ([resumed(8, 1), resumed(4, 1)], [(1, 0, 4), (3, 4, None)]),
        ([resumed(4, 1), resumed(0)], [(1, 0, 0), (3, 0, None)]),
        # A sender that names no checkpoint goes on from the newest epoch that has the step.
        ([resumed(4), resumed(8)], [(1, 0, 4), (2, 4, 8), (3, 8, None)]),
        ([resumed(4), resumed(2)], [(1, 0, 2), (3, 2, None)]),
        ([resumed(4, 1), RunOpened()], [(3, 0, None)]),
    ],
)
def test_a_lineage_is_the_epochs_that_the_run_goes_on_from(openings, lineage):
    assert lineage_spans(state_after(*openings)) == lineage


def test_a_version_stands_if_the_lineage_holds_its_epoch_and_step():
    state = state_after(resumed(4, 1), resumed(8, 2), resumed(8, 2))
    assert lineage_spans(state) == [(1, 0, 4), (2, 4, 8), (4, 8, None)]
    standing = {(1, 0), (1, 4), (2, 4), (2, 8), (4, 8), (4, 9)}
    others = {(1, 5), (2, 3), (2, 9), (3, 8), (3, 9), (4, 7), (5, 9)}
    assert {
        version for version in standing | others if is_in_lineage(state, StepRef(*version))
    } == standing
