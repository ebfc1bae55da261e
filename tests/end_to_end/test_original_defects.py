"""What goes wrong in Trinity-RFT's monitor and coordinator, and what is promised here instead.

Numbers in the docstrings are those of the list of defects that were found and confirmed there:
1 to 16 belong to the monitor and the coordinator.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from contextlib import asynccontextmanager

import anyio
import pytest

from tests.support.errors import raises
from tests.support.event_histories import (
    History,
    committed,
    finished,
    registration,
    slot,
    started,
)
from tests.support.pipeline import OUTCOMES
from tests.support.waits import PATIENCE
from trinity_events import CheckpointCoordinator
from trinity_events.core import FilePlan, IterationFile, encode_state
from trinity_events.core.limits import KEPT_STEPS
from trinity_events.errors import SaveError
from trinity_events.log import (
    AsyncPublisher,
    Publisher,
    Stream,
    new_producer,
)
from trinity_events.log.publishing.async_publisher import opening_envelope
from trinity_events.reducer import CheckpointFiles, Reducer
from trinity_events.testing import MemoryEventLog, Pipeline, SyncMemoryEventLog
from trinity_schemas import (
    Process,
    RunOpened,
    SaveGranted,
    SaveRequested,
    StepFailed,
    StepReady,
    StepRef,
    StepSuperseded,
    ThreadCountRegistered,
    decode_envelope,
)

STATE_DICT = "latest_state_dict_iteration.txt"


def of(events, event_type):
    return [event for event in events if isinstance(event, event_type)]


def ready(announcements):
    return [(event.kind, event.step) for event in of(announcements, StepReady)]


async def under(strategy: str, run: Pipeline) -> int:
    """A new epoch of the pipeline's run under a save strategy."""
    return await run.log.open_epoch(opening_envelope(run.run_id, RunOpened(save_strategy=strategy)))


def coordinator(run: Pipeline, epoch: int, rank: int = 0, **more) -> CheckpointCoordinator:
    publisher = Publisher(SyncMemoryEventLog(run.log), epoch, new_producer("actor", rank))
    return CheckpointCoordinator(publisher, turn_deadline=PATIENCE, **more)


async def in_thread(call, *args) -> None:
    await anyio.to_thread.run_sync(call, *args)


def fail_to_save():
    raise OSError("disk full")


async def test_a_failed_save_frees_its_turn():
    """1: there, the slot of a save that raises is never freed, and all others wait for ever."""
    async with Pipeline() as run:
        epoch = await under("single_thread", run)
        first = coordinator(run, epoch, 0, strategy="single_thread")
        second = coordinator(run, epoch, 1, strategy="single_thread")
        first.save_async("model", fail_to_save, 1)
        with raises(SaveError, __cause__=re.compile("disk full")):
            await in_thread(first.wait_all, PATIENCE)
        saved = []
        second.save_async("model", lambda: saved.append(1), 1)
        await in_thread(second.wait_all, PATIENCE)
        assert saved == [1]


async def test_a_step_whose_save_failed_is_ready_once_it_is_saved_again():
    """2: there, the count of such a step stays wrong for ever, and it is never committed."""
    async with Pipeline() as run:
        worker = run.coordinator()
        worker.save_async("model", fail_to_save, 1, is_state_dict=True)
        await worker.register_and_monitor(1, is_state_dict=True, state_dict_thread_count=1)
        with pytest.raises(SaveError):
            await in_thread(worker.wait_all, PATIENCE)
        worker.save_async("model", lambda: None, 1, is_state_dict=True)
        await worker.register_and_monitor(1, is_state_dict=True, state_dict_thread_count=1)
        await in_thread(worker.wait_all, PATIENCE)
        await run.settled()
        assert ready(run.announcements) == [("state_dict", 1)]


async def test_what_fails_in_the_background_is_raised_and_told_to_everybody():
    """3: there, waiting for the saves returns as if nothing had been, and nobody is told."""
    async with Pipeline() as run:
        worker = run.coordinator(rank=3)
        worker.save_async("model", fail_to_save, 7)
        with raises(SaveError, save="model of step 7", __cause__=re.compile("disk full")):
            await in_thread(worker.wait_all, PATIENCE)
        async with run.subscribe(StepFailed) as events:
            async for failure in events:
                assert "model of actor-3 for checkpoint step 7 failed" in failure.reason
                break


@pytest.mark.parametrize(
    ("strategy", "side_by_side"), [("single_process", ["a"]), ("single_node", ["a", "b"])]
)
def test_processes_of_one_node_are_told_apart(strategy, side_by_side):
    """4: there, a process is known by its job's id, which all processes of a job share."""
    history = History(opened=False)
    history.add(RunOpened(save_strategy=strategy))
    history.add(request("a", "north", pid=1), by="actor", rank=0)
    history.add(request("b", "north", pid=2), by="actor", rank=1)
    assert granted(history) == side_by_side


def request(save_id: str, node: str, pid: int = 1) -> SaveRequested:
    return SaveRequested(
        save_id=save_id,
        slot=slot(1, "checkpoint", name=save_id),
        process=Process(host=node, pid=pid, started=1),
    )


def granted(history: History) -> list[str]:
    return [event.save_id for event in of(history.fold()[1], SaveGranted)]


def test_a_nodes_saves_go_together_and_none_overtakes_those_who_wait():
    """5: there, waiters of one node go one at a time, and newcomers of the node that saves
    overtake them without end.
    """
    history = History(opened=False)
    history.add(RunOpened(save_strategy="single_node"))
    history.add(request("n1", "north"), by="n1")
    for waiting in ("s1", "s2", "s3", "s4"):
        history.add(request(waiting, "south"), by=waiting)
    history.add(request("n2", "north"), by="n2")  # of the node that saves, and after four others
    assert granted(history) == ["n1"]
    history.add(finished(1, "n1", kind="checkpoint", name="n1"), by="n1")
    assert granted(history) == ["n1", "s1", "s2", "s3", "s4"]
    for number, ended in enumerate(("s1", "s2", "s3", "s4")):
        assert len(granted(history)) == 5, f"n2 waits for all of the south, of which {number} ended"
        history.add(finished(1, ended, kind="checkpoint", name=ended), by=ended)
    assert granted(history)[5:] == ["n2"]


async def test_without_a_strategy_nothing_is_left_to_count():
    """6: there, each finish takes one from a count that nothing was added to: -3 after three."""
    async with Pipeline() as run:
        worker = run.coordinator()
        for step in (1, 2, 3):
            worker.save_sync(lambda: None, step)
        await in_thread(worker.wait_all, PATIENCE)
        await run.settled()
        state = run.state
        assert (state.turns, state.queue, state.attempts) == ({}, {}, {})
        assert state.anomaly_counts == {}


async def test_a_turn_covers_the_whole_save_of_every_rank():
    """7: there, only rank 0 asks for a turn, and only after it has written most of its bytes."""
    async with Pipeline() as run:
        epoch = await under("single_thread", run)
        saving, most, lock = [0], [0], threading.Lock()

        def save():
            with lock:
                saving[0] += 1
                most[0] = max(most[0], saving[0])
            time.sleep(0.02)
            with lock:
                saving[0] -= 1

        ranks = [coordinator(run, epoch, rank, strategy="single_thread") for rank in range(4)]
        for worker in ranks:
            worker.save_async("model", save, 1)
        for worker in ranks:
            await in_thread(worker.wait_all, PATIENCE)
        assert most == [1]
        await run.settled()
        assert len(of(run.announcements, SaveGranted)) == 4


async def test_a_checkpoint_waits_for_each_of_its_saves_and_names_them():
    """8: there, a whole checkpoint is registered as one state dict; nothing else is waited for."""
    async with Pipeline() as run:
        trainer = run.coordinator("trainer")
        await trainer.register_and_monitor(5, state_dict_thread_count=1, checkpoint_thread_count=2)
        actor, critic = run.coordinator("actor"), run.coordinator("critic")
        for save, worker, is_state_dict in (
            ("weights", actor, True),
            ("optimizer", actor, False),
            ("optimizer", critic, False),
        ):
            await run.settled()
            assert of(run.announcements, StepReady) == []
            worker.save_sync(lambda: None, 5, is_state_dict, name=save)
            await in_thread(worker.wait_all, PATIENCE)
        await run.settled()
        of_weights, whole = of(run.announcements, StepReady)
        assert [(save.slot.role, save.slot.name) for save in of_weights.saves] == [
            ("actor", "weights")
        ]
        assert sorted((save.slot.role, save.slot.name) for save in whole.saves) == [
            ("actor", "optimizer"),
            ("actor", "weights"),
            ("critic", "optimizer"),
        ]


def test_a_finish_told_twice_proves_nothing_about_another_save():
    """9: there, finishes are counted: one told twice commits a step that another still writes,
    and a step of which nothing is registered is committed at once.
    """
    history = History()
    history.add(committed(1, "state_dict", registration(expected=2)))
    history.add(finished(1, "a", rank=0), by="actor")
    history.add(finished(1, "a", rank=0), by="actor", sequence=1)
    history.add(finished(1, "a", rank=0), by="actor", sequence=2)  # sent anew, by mistake
    history.add(committed(2, "state_dict"))
    assert ready(history.fold()[1]) == []
    history.add(finished(1, "b", rank=1), by="actor", rank=1)
    assert ready(history.fold()[1]) == [("state_dict", 1)]


async def test_saves_that_end_out_of_order_are_no_error_to_anyone():
    """10: there, the saver of the older step is hit by an AssertionError of the monitor."""
    async with Pipeline() as run:
        slow, fast = run.coordinator(rank=0), run.coordinator(rank=1)
        release = threading.Event()
        slow.save_async("model", lambda: release.wait(PATIENCE), 1)
        await slow.register_and_monitor(1, checkpoint_thread_count=1)
        fast.save_sync(lambda: None, 2)
        await fast.register_and_monitor(2, checkpoint_thread_count=1)
        await run.settled()
        release.set()
        await in_thread(slow.wait_all, PATIENCE)  # raises nothing
        await run.settled()
        assert ready(run.announcements) == [("checkpoint", 2)]
        [late] = of(run.announcements, StepSuperseded)
        assert (late.step, late.by.step) == (1, 2)


@asynccontextmanager
async def reducing(log: MemoryEventLog):
    """A reducer of its own, which ends as one that is killed: what it knew is gone."""
    async with anyio.create_task_group() as tasks:
        token, _ = await log.lead(3600.0)
        tasks.start_soon(Reducer(log, None, token).run)
        yield
        tasks.cancel_scope.cancel()
    await log.renew(token, 0)


async def announced(log: MemoryEventLog):
    """The outcomes that are announced once all that was published is folded."""
    with anyio.fail_after(PATIENCE):
        while (await log.load())[1] != log.last_id_now():
            await anyio.sleep(0.01)
    entries = log.read_now(stream=Stream.ANNOUNCEMENTS)
    events = [decode_envelope(entry.payload).event for entry in entries]
    return [event for event in events if isinstance(event, OUTCOMES)]


async def test_what_is_known_of_a_step_outlives_the_reducer():
    """11: there, counts die with the monitor: after a restart they are wrong, and the step is
    never committed.
    """
    log = MemoryEventLog("test")
    epoch = await log.open_epoch(opening_envelope("test", RunOpened()))
    trainer = AsyncPublisher(log, epoch, new_producer("trainer"))
    actor = AsyncPublisher(log, epoch, new_producer("actor"))
    async with reducing(log):
        await trainer.publish(committed(1, "state_dict", registration(expected=2)))
        await actor.publish(finished(1, "a", rank=0))
        await actor.publish(committed(1, "checkpoint", registration("checkpoint", 0)))
        assert await announced(log) == []
    await actor.publish(finished(1, "b", rank=1))  # while there is none
    for _ in range(2):
        async with reducing(log):
            announcements = await announced(log)
    assert ready(announcements) == [("state_dict", 1), ("checkpoint", 1)]


def test_steps_that_are_over_leave_next_to_nothing_behind():
    """12: there, counts and sets grow by every step of the run."""
    sizes = []
    for steps in (2 * KEPT_STEPS, 10 * KEPT_STEPS):
        history = History()
        for step in range(1, steps + 1):
            history.add(started(step, f"a{step}"))
            history.add(finished(step, f"a{step}"))
            history.add(committed(step, "state_dict", registration()))
        sizes.append(len(encode_state(history.fold()[0].state)))
    assert sizes[1] < 1.2 * sizes[0]


async def test_a_slow_disk_holds_up_no_turn(tmp_path, monkeypatch):
    """13: there, a worker that asks for its turn waits for whatever file is being written."""
    stuck, release = threading.Event(), threading.Event()

    def reconcile(self, plan):
        stuck.set()
        release.wait(PATIENCE)

    monkeypatch.setattr(CheckpointFiles, "reconcile", reconcile)
    try:
        async with Pipeline(checkpoint_folder=tmp_path / "run") as run:
            epoch = await under("single_thread", run)
            await in_thread(stuck.wait, PATIENCE)
            saved = []
            worker = coordinator(run, epoch, strategy="single_thread")
            worker.save_async("model", lambda: saved.append(1), 1)
            await in_thread(worker.wait_all, PATIENCE)
            assert saved == [1]
            assert not release.is_set()
            release.set()
    finally:
        release.set()


def test_an_iteration_file_is_whole_at_every_moment(tmp_path, monkeypatch):
    """14: there, it is emptied before it is written, and a crash in between ends the resume."""
    files = CheckpointFiles(tmp_path, "run")
    plan = [
        FilePlan(promotions=(), iterations=(IterationFile(name, "state_dict", StepRef(1, step)),))
        for name, step in ((STATE_DICT, 1), (STATE_DICT, 2))
    ]
    for step in (1, 2):
        (tmp_path / "run" / f"global_step_{step}").mkdir(parents=True)
        (tmp_path / "run" / f"global_step_{step}" / "model.pt").touch()
    files.reconcile(plan[0])
    tracker = tmp_path / "run" / STATE_DICT
    seen, fsync = [], os.fsync

    def look(handle):
        seen.append(tracker.read_text())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", look)

    def crash(*_, **__):
        raise OSError("the power went")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", crash)
        files.reconcile(plan[1])
    assert tracker.read_text() == "1"
    files.reconcile(plan[1])
    assert tracker.read_text() == "2"
    # The new one is durable before it has the name, and the name before anything follows.
    assert seen == ["1", "1", "2"]


async def test_committing_a_step_holds_up_nothing_else_in_its_process():
    """15: there, committing blocks the whole event loop, and the trainer seems dead meanwhile."""
    log, release = MemoryEventLog("test"), threading.Event()

    class Slow(SyncMemoryEventLog):
        remote = True

        def append_many(self, payloads):
            release.wait(PATIENCE)
            return super().append_many(payloads)

    epoch = await log.open_epoch(opening_envelope("test", RunOpened()))
    publisher = Publisher(Slow(log), epoch, new_producer("trainer"))
    worker = CheckpointCoordinator(publisher)
    commit = asyncio.create_task(worker.register_and_monitor(1, checkpoint_thread_count=1))
    for _ in range(100):
        await asyncio.sleep(0)  # others have their turns
    assert not commit.done()
    release.set()
    await asyncio.wait_for(commit, PATIENCE)
    assert len(log.read_now()) == 3
    await in_thread(publisher.close)


def test_a_trainer_that_dies_between_registering_and_committing_harms_nobody():
    """16: there, these are two calls, and a crash between them leaves a step that is registered
    and never asked for.
    """
    history, registered = History(), registration("checkpoint")
    # The commit says again what was registered: it needs nothing that came before it.
    history.add(committed(2, "checkpoint", registered))
    history.add(finished(2, kind="checkpoint"))
    # Registered, and then the trainer was gone: later steps do not wait for it.
    history.add(ThreadCountRegistered(step=3, registration=registered))
    history.add(committed(4, "checkpoint", registered), by="trainer", rank=1)
    history.add(finished(4, kind="checkpoint"))
    monitor, announcements = history.fold()
    assert ready(announcements) == [("checkpoint", 2), ("checkpoint", 4)]
    assert len(of(announcements, StepReady)) == len(announcements)
    assert monitor.state.anomaly_counts == {}
