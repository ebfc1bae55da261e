"""A kind of a step is ready when all of it is saved, whatever was registered (invariant 2)."""

from __future__ import annotations

import io
import threading

import anyio.to_thread
import pytest
from rich.console import Console

from tests.support.event_histories import (
    History,
    committed,
    failed,
    finished,
    registration,
    started,
)
from tests.support.pipeline import folded, reducer_task, until
from trinity_events import CheckpointCoordinator
from trinity_events.analysis.explain import explain
from trinity_events.coordinator import staged_path
from trinity_events.core import decode_state, encode_state, plan_files
from trinity_events.log import Publisher, Stream, SyncEventLog, new_producer
from trinity_events.views.status import status_panel
from trinity_schemas import (
    DeadlineReached,
    ExpiredAttempt,
    LeaseExpired,
    Producer,
    RunOpened,
    SaveRequested,
    StepFailed,
    StepReady,
    ThreadCountRegistered,
    decode_envelope,
)

A, B = ".staging/a", ".staging/b"


def ready(announcements):
    return [(event.kind, event.step) for event in announcements if isinstance(event, StepReady)]


def begins(history, rank, save_id=None, ranks=None, **at):
    history.add(started(5, save_id or f"s{rank}", rank=rank, ranks=ranks, **at), by="w", rank=rank)


def ends(history, rank, save_id=None, path=None, ranks=None, **at):
    done = finished(5, save_id or f"s{rank}", path, rank=rank, ranks=ranks, **at)
    history.add(done, by="w", rank=rank)


def expires(rank, save_id, **at):
    return LeaseExpired(
        holder=Producer(role="w", rank=rank, node="here", incarnation=f"w-{rank}"),
        lease=15.0,
        attempts=(ExpiredAttempt(save_id=save_id, slot=started(5, rank=rank, **at).slot),),
    )


# --- of how many ranks a save is one -----------------------------------------------------------


@pytest.mark.parametrize("first", ["commit", "saves"])
def test_all_ranks_of_a_save_are_expected_whatever_was_registered(first):
    history = History()
    if first == "commit":
        history.add(committed(5, "state_dict", registration(expected=1)))
    begins(history, 0, ranks=3)
    ends(history, 0, ranks=3)
    if first == "saves":
        history.add(committed(5, "state_dict", registration(expected=1)))
    monitor, announcements = history.fold()
    assert ready(announcements) == []
    assert "2 of 3 saves: model of actor-1 (not started); model of actor-2 (not started)" in (
        explain(monitor.state, 5)
    )
    begins(history, 1, ranks=3)
    ends(history, 1, ranks=3)
    ends(history, 2, ranks=3)  # its start was lost
    assert ready(history.fold()[1]) == [("state_dict", 5)]


def test_a_finish_alone_says_of_how_many_ranks_it_is_one():
    history = History()
    history.add(committed(5, "state_dict", registration(expected=1)))
    ends(history, 1, ranks=2)
    assert ready(history.fold()[1]) == []
    ends(history, 0, ranks=2)
    assert ready(history.fold()[1]) == [("state_dict", 5)]


def test_saves_of_two_names_each_have_their_own_ranks():
    history = History()
    history.add(committed(5, "checkpoint", registration("checkpoint", 1)))
    for rank in (0, 1):
        ends(history, rank, f"o{rank}", ranks=2, kind="checkpoint", name="optimizer")
        ends(history, rank, f"d{rank}", ranks=3, kind="checkpoint", name="data")
    assert ready(history.fold()[1]) == []
    ends(history, 2, "d2", ranks=3, kind="checkpoint", name="data")
    assert ready(history.fold()[1]) == [("checkpoint", 5)]


def test_ranks_need_not_be_counted_from_zero():
    history = History()
    history.add(committed(5, "state_dict", registration(expected=1)))
    ends(history, 6, ranks=2)
    assert "1 of 2 saves" in explain(history.fold()[0].state, 5)
    ends(history, 7, ranks=2)
    assert ready(history.fold()[1]) == [("state_dict", 5)]


def test_what_ranks_were_said_survives_a_snapshot_and_ends_with_the_step():
    history = History()
    history.add(committed(5, "state_dict", registration(expected=1)))
    ends(history, 0, ranks=2)
    monitor, _ = history.fold()
    assert decode_state(encode_state(monitor.state)) == monitor.state
    assert monitor.state.steps[5].kinds["state_dict"].ranks != {}
    ends(history, 1, ranks=2)
    history.add(committed(6, "state_dict", registration(expected=0)))
    assert history.fold()[0].state.steps[5].kinds["state_dict"].ranks == {}, "it is compacted"


# --- what is under way -------------------------------------------------------------------------


@pytest.mark.parametrize("is_requested", [False, True])
@pytest.mark.parametrize("expected", [0, 1])
def test_a_kind_is_not_ready_while_a_save_that_was_not_registered_is_under_way(
    is_requested, expected
):
    history = History()
    if is_requested:
        request = SaveRequested(save_id="s1", slot=started(5, rank=1).slot)
        history.add(request, by="w", rank=1)
    else:
        begins(history, 1)
    history.add(committed(5, "state_dict", registration(expected=expected)))
    ends(history, 0)
    assert ready(history.fold()[1]) == []
    ends(history, 1)
    monitor, announcements = history.fold()
    assert ready(announcements) == [("state_dict", 5)]
    assert monitor.state.anomaly_counts == {"unregistered": 1}
    assert f"{2} saves of state_dict step 5" in monitor.state.anomalies[0].detail


@pytest.mark.parametrize("dies", [False, True])
def test_a_save_that_was_not_registered_and_fails_fails_the_step_until_it_is_tried_again(dies):
    history = History()
    history.add(committed(5, "state_dict", registration(expected=1)))
    begins(history, 1)
    ends(history, 0)
    gone = expires(1, "s1") if dies else failed(5, "s1", rank=1)
    history.add(gone, by="reducer" if dies else "w", rank=1)
    announcements = history.fold()[1]
    assert [type(event) for event in announcements] == [StepFailed]
    ends(history, 1, "again")
    assert ready(history.fold()[1]) == [("state_dict", 5)]


def test_saves_that_are_late_and_were_not_registered_are_an_anomaly_and_change_nothing():
    history = History()
    history.add(committed(5, "checkpoint", registration("checkpoint", 1)))
    ends(history, 0, path=f"{A}/0", kind="checkpoint")
    plan = plan_files(history.fold()[0].state)
    begins(history, 1, kind="checkpoint")
    ends(history, 1, path=f"{B}/1", kind="checkpoint")
    monitor, announcements = history.fold()
    assert ready(announcements) == [("checkpoint", 5)]
    assert monitor.state.anomaly_counts == {"unregistered": 1}
    assert "model of actor-1 for checkpoint step 5" in monitor.state.anomalies[0].detail
    assert plan_files(monitor.state) == plan


def test_status_shows_that_more_was_saved_than_was_registered():
    history = History()
    history.add(committed(5, "state_dict", registration(expected=1)))
    for rank in (0, 1):
        begins(history, rank)
    for rank in (0, 1):
        ends(history, rank)
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(status_panel(history.fold()[0].state))
    text = shown.export_text()
    assert "Anomalies: unregistered 1." in text
    assert "2 saves of state_dict step 5 were made, and 1 registered" in text


def test_a_registration_that_comes_late_makes_no_anomaly_of_what_it_counts():
    history = History()
    history.add(committed(5, "state_dict", registration(expected=1)))
    for rank in (0, 1):
        begins(history, rank)
        ends(history, rank) if rank else None
    more = registration(expected=1, name="second")
    history.add(ThreadCountRegistered(step=5, registration=more), by="second")
    ends(history, 0)
    monitor, announcements = history.fold()
    assert (ready(announcements), monitor.state.anomaly_counts) == ([("state_dict", 5)], {})


# --- state dict, then checkpoint, at one step --------------------------------------------------


def both(ranks=2):
    return registration("state_dict", ranks), registration("checkpoint", ranks)


def state_dict_then_checkpoint(history=None):
    """The state dict is ready in A; a checkpoint with its own is being saved to B."""
    history = history or History()
    for rank in (0, 1):
        begins(history, rank, f"a{rank}", path=f"{A}/model_{rank}")
    history.add(committed(5, "state_dict", registration(expected=2)))
    for rank in (0, 1):
        ends(history, rank, f"a{rank}", f"{A}/model_{rank}")
    history.add(committed(5, "checkpoint", *both()))
    return history


def saves_training_state(history):
    for rank in (0, 1):
        at = {"kind": "checkpoint", "name": "training_state"}
        ends(history, rank, f"t{rank}", f"{B}/optim_{rank}", **at)


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_checkpoint_waits_for_the_model_in_its_own_folder(is_reported):
    history = state_dict_then_checkpoint()
    if is_reported:  # or its events are still on their way
        for rank in (0, 1):
            begins(history, rank, f"b{rank}", path=f"{B}/model_{rank}")
    saves_training_state(history)
    ends(history, 0, "b0", f"{B}/model_0")
    monitor, announcements = history.fold()
    assert ready(announcements) == [("state_dict", 5)]
    assert f"1 of 2 saves of its state dict in {B}" in explain(monitor.state, 5)
    assert [promotion.staged for promotion in plan_files(monitor.state).promotions] == [A]
    ends(history, 1, "b1", f"{B}/model_1")
    monitor, announcements = history.fold()
    assert ready(announcements) == [("state_dict", 5), ("checkpoint", 5)]
    assert announcements[-1].path == B
    assert sorted(save.save_id for save in announcements[-1].saves) == ["b0", "b1", "t0", "t1"]
    assert monitor.state.anomaly_counts == {}
    assert decode_state(encode_state(monitor.state)) == monitor.state


def test_a_checkpoint_whose_own_model_fails_is_failed_and_not_ready():
    history = state_dict_then_checkpoint()
    for rank in (0, 1):
        begins(history, rank, f"b{rank}", path=f"{B}/model_{rank}")
    saves_training_state(history)
    ends(history, 0, "b0", f"{B}/model_0")
    history.add(failed(5, "b1", rank=1), by="w", rank=1)
    announcements = history.fold()[1]
    assert ready(announcements) == [("state_dict", 5)]
    assert [
        (event.kind, "disk full" in event.reason)
        for event in announcements
        if isinstance(event, StepFailed)
    ]
    ends(history, 1, "b2", f"{B}/model_1")
    assert ready(history.fold()[1]) == [("state_dict", 5), ("checkpoint", 5)]


@pytest.mark.parametrize("dies", [False, True])
def test_a_checkpoint_whose_own_model_failed_before_its_commit_is_failed_by_it(dies):
    history = History()
    history.add(committed(5, "state_dict", registration()))
    ends(history, 0, "a0", f"{A}/model_0")
    begins(history, 0, "b0", path=f"{B}/model_0")
    gone = expires(0, "b0") if dies else failed(5, "b0")
    history.add(gone, by="reducer" if dies else "w")
    assert not [event for event in history.fold()[1] if isinstance(event, StepFailed)]
    history.add(committed(5, "checkpoint", *both(1)))
    [failure] = [event for event in history.fold()[1] if isinstance(event, StepFailed)]
    assert failure.kind == "checkpoint"


def test_a_checkpoint_that_lacks_its_own_model_at_its_deadline_says_so():
    history = state_dict_then_checkpoint()
    saves_training_state(history)
    late = DeadlineReached(step=5, kind="checkpoint", seconds=600.0)
    history.add(late, by="reducer")
    [failure] = [event for event in history.fold()[1] if isinstance(event, StepFailed)]
    assert failure.kind == "checkpoint"
    assert f"2 of 2 saves of its state dict in {B}" in failure.reason


def test_a_state_dict_of_which_a_rank_was_saved_to_two_folders_is_ready_in_either():
    history = History()
    history.add(committed(5, "state_dict", registration(expected=2)))
    ends(history, 0, "a0", f"{A}/model_0")
    ends(history, 0, "b0", f"{B}/model_0")
    ends(history, 1, "a1", f"{A}/model_1")
    [announcement] = [event for event in history.fold()[1] if isinstance(event, StepReady)]
    assert (announcement.path, [save.save_id for save in announcement.saves]) == (A, ["a0", "a1"])


def test_a_checkpoint_that_registers_no_state_dict_of_its_own_rests_on_the_one_before():
    history = state_dict_then_checkpoint()
    history.entries.pop()
    history = History()
    history.add(committed(5, "state_dict", registration(expected=1)))
    ends(history, 0, "a0", f"{A}/model_0")
    history.add(committed(5, "checkpoint", registration("checkpoint", 1)))
    ends(history, 0, "t0", f"{B}/optim_0", kind="checkpoint", name="training_state")
    announcements = history.fold()[1]
    assert ready(announcements) == [("state_dict", 5), ("checkpoint", 5)]
    assert [save.save_id for save in announcements[-1].saves] == ["t0", "a0"]


def test_a_new_epoch_forgets_what_the_one_before_had_under_way():
    history = History()
    begins(history, 1, ranks=2)
    history.add(RunOpened(), by="second", epoch=2)
    history.epoch = 2
    history.add(committed(5, "state_dict", registration(expected=1)), by="second")
    history.add(finished(5, "new"), by="w2")
    assert ready(history.fold()[1]) == [("state_dict", 5)]


# --- on a server and a disk --------------------------------------------------------------------


@pytest.fixture
def worker(publisher, sync_client, run_id, tmp_path):
    """A coordinator of a worker, which registers and commits as the trainer does, too."""
    own = Publisher(SyncEventLog(sync_client, run_id), publisher.epoch, new_producer("actor"))
    yield CheckpointCoordinator(own, tmp_path / run_id)
    own.close()


async def announcements(log):
    entries = await log.read(stream=Stream.ANNOUNCEMENTS)
    return [decode_envelope(entry.payload).event for entry in entries]


async def test_a_checkpoint_after_its_state_dict_is_renamed_when_its_own_model_is_written(
    worker, publisher, log, redis_url, run_id, tmp_path
):
    folder, let_go = tmp_path / run_id, threading.Event()
    first, second = (staged_path(folder, publisher.epoch, 5) for _ in range(2))

    def write(path, content, when=None):
        def save():
            assert when is None or when.wait(60)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

        return save

    async with reducer_task(redis_url, run_id, tmp_path):
        model = first / "model.pt"
        worker.save_async("model_state_dict", write(model, "a"), 5, True, path=model, ranks=1)
        await worker.register_and_monitor(5, is_state_dict=True, state_dict_thread_count=1)
        await until((folder / "global_step_5" / "model.pt").exists)

        model, optimizer = second / "model.pt", second / "optim.pt"
        again = write(model, "b", let_go)
        worker.save_async("model_state_dict", again, 5, True, path=model, ranks=1)
        other = write(optimizer, "c")
        worker.save_async("training_state", other, 5, path=optimizer, ranks=1)
        await worker.register_and_monitor(5, False, 1, 1)
        await until(optimizer.exists)
        await folded(log)
        assert ready(await announcements(log)) == [("state_dict", 5)]
        assert not (folder / "latest_checkpointed_iteration.txt").exists()
        assert second.is_dir(), "it is not renamed under its writer"
        let_go.set()
        await anyio.to_thread.run_sync(worker.wait_all)
        await until((folder / "latest_checkpointed_iteration.txt").exists)
        made = folder / "global_step_5"
        assert [(made / name).read_text() for name in ("model.pt", "optim.pt")] == ["b", "c"]
        assert ready(await announcements(log)) == [("state_dict", 5), ("checkpoint", 5)]
