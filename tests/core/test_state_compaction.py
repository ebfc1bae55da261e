"""What the state keeps of steps that are over, and which of their folders may go."""

import pytest

from tests.support.event_histories import (
    History,
    committed,
    finished,
    publish_weights,
    registration,
    verified,
)
from trinity_events.checkpoints.layout import parse_staged_name, staged_name
from trinity_events.core import encode_state, plan_files, removable_steps
from trinity_events.core.decisions.checkpoint_retention import LEFTOVERS_KEPT, passed_leftovers
from trinity_schemas import RunOpened, RunResumed, StepReady

RANKS = 64


def save_step(history, step, kind="checkpoint", folder=None, ranks=RANKS):
    path = folder or f".staging/step_{step}"
    for rank in range(ranks):
        event = finished(step, f"s{step}-{rank}", path=f"{path}/{rank}", kind=kind, rank=rank)
        history.add(event, by="actor", rank=rank)
    history.add(committed(step, kind, registration(kind, ranks)))


def test_the_state_does_not_grow_with_checkpoints_that_are_behind():
    sizes = []
    history = History()
    for step in range(1, 21):
        save_step(history, step)
        if step in (2, 20):
            sizes.append(len(encode_state(history.fold()[0].state)))
    assert sizes[1] < 1.2 * sizes[0]


def test_the_newest_ready_step_keeps_its_proof():
    history = History()
    save_step(history, 1)
    save_step(history, 2)
    steps = history.fold()[0].state.steps
    assert steps[1].kinds["checkpoint"].compacted
    assert steps[1].kinds["checkpoint"].finished == RANKS
    assert len(steps[2].kinds["checkpoint"].slots) == RANKS


def test_a_step_with_a_kind_that_may_yet_be_ready_is_kept_whole():
    history = History()
    save_step(history, 1, "state_dict")
    history.add(committed(1, "checkpoint", registration("checkpoint", 1)))
    save_step(history, 2, "state_dict")
    kinds = history.fold()[0].state.steps[1].kinds
    assert not kinds["state_dict"].compacted
    history.add(finished(1, "late", kind="checkpoint"), by="slow")
    _, announcements = history.fold()
    ready = [
        event
        for event in announcements
        if isinstance(event, StepReady) and event.kind == "checkpoint"
    ]
    assert [(event.step, event.save_count) for event in ready] == [(1, RANKS + 1)]


def test_a_checkpoint_may_rest_on_a_state_dict_that_was_compacted():
    history = History()
    save_step(history, 1, "state_dict", ranks=2)
    save_step(history, 2, "state_dict", ranks=2)
    save_step(history, 1, "checkpoint", ranks=2)
    _, announcements = history.fold()
    [ready] = [
        event
        for event in announcements
        if isinstance(event, StepReady) and event.kind == "checkpoint"
    ]
    assert (ready.save_count, ready.path) == (4, ".staging/step_1")


def test_what_comes_late_for_a_compacted_step_changes_nothing():
    history = History()
    save_step(history, 1, ranks=1)
    save_step(history, 2, ranks=1)
    before = history.fold()[0].state.steps[1]
    history.add(finished(1, "again", kind="checkpoint"), by="late")
    history.add(committed(1, "checkpoint", registration("checkpoint", 9, "more")), by="late")
    monitor, _ = history.fold()
    assert monitor.state.steps[1] == before
    assert monitor.state.anomaly_counts == {"late": 1}


def test_a_compacted_step_keeps_its_folder_until_it_has_its_name():
    history = History()
    save_step(history, 1, ranks=2)
    save_step(history, 2, ranks=2)
    plan = plan_files(history.fold()[0].state)
    assert [(promotion.step, promotion.staged) for promotion in plan.promotions] == [
        (1, ".staging/step_1"),
        (2, ".staging/step_2"),
    ]


def test_weights_behind_the_newest_leave_nothing_behind():
    history = History()
    for step in range(1, 6):
        publish_weights(history, step)
    steps = history.fold()[0].state.steps
    assert [step for step, state in steps.items() if state.version is not None] == [5]


def folders(*steps, keep=2, kind="checkpoint", resumed=None):
    history = History()
    for step in steps:
        save_step(history, step, kind, ranks=1)
    if resumed is not None:
        history.add(RunResumed(step=resumed), epoch=2)
    return lambda *present: removable_steps(
        history.fold()[0].state, verified(1, *(present or steps), kinds=(kind,)), keep
    )


def test_the_last_checkpoints_stay():
    assert folders(10, 20, 30, 40)() == [10, 20]
    assert folders(10, 20, 30, 40, keep=1)() == [10, 20, 30]


def test_nothing_goes_before_a_newer_one_is_ready():
    assert folders(10)() == []
    assert folders(10, 20)(10, 20, 30) == []


def test_zero_keeps_every_checkpoint():
    assert folders(10, 20, 30, 40, keep=0)() == []


@pytest.mark.parametrize("steps", [(1, 2, 3)])
def test_of_state_dicts_the_newest_alone_stays(steps):
    assert folders(*steps, kind="state_dict")() == [1, 2]


def again(*steps, opening):
    """A second epoch with checkpoints of its own, after one with 100, 200 and 300."""
    history = History()
    for step in (100, 200, 300):
        save_step(history, step, "checkpoint", ranks=1)
    history.add(opening, epoch=2)
    history.epoch = 2
    for step in steps:
        save_step(history, step, "checkpoint", ranks=1)
    return history.fold()[0].state


@pytest.mark.parametrize("steps", [(100, 200, 300, 400), (150, 250, 350, 450), (1000, 2000)])
def test_nothing_of_an_earlier_epoch_goes_when_a_run_begins_anew(steps):
    state, earlier = again(*steps, opening=RunOpened()), verified(1, 100, 200, 300)
    assert removable_steps(state, earlier, 1) == []
    assert removable_steps(state, earlier | verified(2, *steps), 1) == list(steps[:-1])


def test_of_the_epoch_that_a_run_goes_on_from_goes_only_what_it_goes_on_from():
    state = again(250, 350, 450, opening=RunResumed(step=200))
    present = verified(1, 100, 200, 300) | verified(2, 250, 350, 450)
    assert removable_steps(state, present, 2) == [100, 200, 250]


def test_a_checkpoint_that_was_whole_too_late_is_one_of_those_that_stay():
    state = again(100, 300, 200, opening=RunOpened())
    assert state.steps[200].kinds["checkpoint"].outcome == "superseded"
    assert removable_steps(state, verified(2, 100, 200, 300), 2) == [100]


def test_after_a_resume_nothing_goes_before_the_new_epoch_has_a_checkpoint():
    assert folders(10, 20, 30, 40, resumed=20)() == []
    assert folders(10, 20, 30, 40, resumed=20, keep=1)() == []


# --- evidence: a client that may append events makes no checkpoint removable --------------------


def invent(history, *steps, kind="checkpoint"):
    """Complete steps as the log has them, of saves that no process made."""
    for step in steps:
        history.add(finished(step, f"evil-{step}", kind=kind), by="evil")
        history.add(committed(step, kind, registration(kind)), by="evil")


@pytest.fixture
def three_checkpoints():
    history = History()
    for step in (10, 20, 30):
        save_step(history, step, ranks=1)
    return history


def removable(history, made, keep=2):
    return removable_steps(history.fold()[0].state, made, keep)


@pytest.mark.parametrize("kind", ["checkpoint", "state_dict"])
def test_invented_steps_without_a_folder_remove_nothing(three_checkpoints, kind):
    invent(three_checkpoints, 90_001, 90_002, 90_003, kind=kind)
    assert removable(three_checkpoints, verified(1, 20, 30)) == []


def test_a_folder_without_evidence_is_not_counted_and_not_removed(three_checkpoints):
    made = verified(1, 10, 20) | {30: None}
    assert removable(three_checkpoints, made) == []
    assert removable(three_checkpoints, made | verified(1, 30) | {10: None}, 1) == [20]


def test_checkpoints_are_removed_as_before_beside_invented_ones(three_checkpoints):
    invent(three_checkpoints, 90_001, 90_002, 90_003)
    save_step(three_checkpoints, 40, ranks=1)
    assert removable(three_checkpoints, verified(1, 10, 20, 30, 40)) == [10, 20]


def test_an_invented_checkpoint_in_the_folder_of_a_state_dict_counts_for_nothing():
    history = History()
    for step in (10, 20):
        save_step(history, step, ranks=1)
    for step in (21, 22):
        save_step(history, step, "state_dict", ranks=1)
    made = verified(1, 10, 20) | verified(1, 21, 22, kinds=("state_dict",))
    invent(history, 21, 22)
    assert removable(history, made) == []


@pytest.mark.parametrize(
    "opening", [RunOpened(), RunResumed(step=10), RunResumed(step=30), RunResumed(step=90_000)]
)
def test_an_invented_epoch_removes_nothing(three_checkpoints, opening):
    three_checkpoints.add(opening, by="evil", epoch=7)
    three_checkpoints.epoch = 7
    invent(three_checkpoints, 90_001, 90_002)
    assert removable(three_checkpoints, verified(1, 10, 20, 30), 1) == []


def leftover(step, epoch=1, token="a"):
    return parse_staged_name(staged_name(epoch, step, token))


def test_a_staged_folder_goes_once_a_newer_one_has_evidence():
    given_up = [leftover(20), leftover(30), leftover(30, token="b"), leftover(5, epoch=2)]
    assert set(passed_leftovers(given_up, verified(1, 30))) == set(given_up[:3])
    assert set(passed_leftovers(given_up, verified(2, 5))) == set(given_up)


def test_the_newest_staged_folders_stay_without_evidence_of_a_newer_one():
    given_up = [leftover(20, epoch) for epoch in range(1, 6)]
    for made in ({}, {20: None}, verified(1, 10)):
        assert set(passed_leftovers(given_up, made)) == set(given_up[:-LEFTOVERS_KEPT])
