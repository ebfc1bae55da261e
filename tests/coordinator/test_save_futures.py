"""Saves that end with a future, saves of several paths, and the wait for one name."""

import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.errors import raises
from tests.support.event_histories import History
from tests.support.waits import PATIENCE
from trinity_events import CheckpointCoordinator
from trinity_events.archive.checkpoint_digests import CheckedFiles, SavedFiles
from trinity_events.coordinator.save_run import AsyncioFutureReturned
from trinity_events.coordinator.saved_paths import MOST_PATHS, PathCountRefused
from trinity_events.errors import SaveError
from trinity_events.log import MemoryEventLog, Publisher, new_producer
from trinity_events.log.memory.event_log import SyncMemoryEventLog
from trinity_schemas import SaveFailed, SaveFinished, SaveStarted, StepCommitted, decode_envelope


@pytest.fixture
def log():
    return MemoryEventLog("test")


@pytest.fixture
def coordinator(log, tmp_path):
    publisher = Publisher(SyncMemoryEventLog(log), 1, new_producer("actor"))
    coordinator = CheckpointCoordinator(publisher, tmp_path)
    yield coordinator
    coordinator.wait_all(PATIENCE)
    publisher.close()


async def read_events(log, *types):
    events = [decode_envelope(entry.payload).event for entry in await log.read(limit=1000)]
    return [event for event in events if isinstance(event, types)]


async def test_a_save_lasts_as_long_as_the_future_that_its_function_returns(coordinator, log):
    future, begun = Future(), threading.Event()

    def save():
        begun.set()
        return future

    coordinator.save_async("model", save, 1)
    assert begun.wait(PATIENCE)
    assert await read_events(log, SaveFinished) == []
    future.set_result(None)
    coordinator.wait("model", PATIENCE)
    assert len(await read_events(log, SaveFinished)) == 1


async def test_a_future_that_raises_fails_its_save(coordinator, log):
    future = Future()
    future.set_exception(OSError("no space left"))
    coordinator.save_async("model", lambda: future, 1)
    with raises(SaveError, __cause__=re.compile("no space left")):
        coordinator.wait("model", PATIENCE)
    [failed] = await read_events(log, SaveFailed)
    assert (failed.error_type, failed.message) == ("OSError", "no space left")


async def test_an_asyncio_future_is_refused_in_a_sentence(coordinator):
    import asyncio

    future = asyncio.get_running_loop().create_future()
    with pytest.raises(AsyncioFutureReturned):
        coordinator.save_sync(lambda: future, 1)


async def test_a_started_save_begins_in_the_callers_thread_after_the_one_before(coordinator, log):
    ended, begun = [Future(), Future()], []

    def start(number):
        begun.append((number, threading.get_ident(), [future.done() for future in ended]))
        return ended[number]

    coordinator.start_save("model", lambda: start(0), 1)
    timer = threading.Timer(0.1, ended[0].set_result, [None])
    timer.start()
    coordinator.start_save("model", lambda: start(1), 2)
    timer.join()
    me = threading.get_ident()
    assert begun == [(0, me, [False, False]), (1, me, [True, False])]
    ended[1].set_result(None)
    coordinator.wait_all(PATIENCE)
    steps = [
        (type(event).__name__, event.slot.step)
        for event in await read_events(log, SaveStarted, SaveFinished)
    ]
    assert steps == [
        ("SaveStarted", 1),
        ("SaveFinished", 1),
        ("SaveStarted", 2),
        ("SaveFinished", 2),
    ]


async def test_a_start_that_raises_fails_the_save_and_frees_its_name(coordinator, log):
    with pytest.raises(ValueError, match="no plan"):
        coordinator.start_save("model", lambda: _raise(ValueError("no plan")), 1)
    coordinator.save_async("model", lambda: None, 2)
    coordinator.wait_all(PATIENCE)
    assert [event.message for event in await read_events(log, SaveFailed)] == ["no plan"]
    assert [event.slot.step for event in await read_events(log, SaveFinished)] == [2]


async def test_waiting_for_one_name_leaves_the_others_and_their_failures(coordinator):
    release = threading.Event()
    coordinator.save_async("broken", lambda: _raise(ValueError("broken")), 1)
    coordinator.save_async("slow", lambda: release.wait(PATIENCE), 1)
    coordinator.save_async("quick", lambda: None, 1)
    coordinator.wait("quick", PATIENCE)
    release.set()
    coordinator.wait("slow", PATIENCE)
    with raises(SaveError, save="broken of step 1"):
        coordinator.wait_all(PATIENCE)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
async def test_torchs_async_save_begins_in_its_turn_and_its_error_is_the_cause(
    coordinator, log, tmp_path
):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state, folder = {"weight": torch.ones(4)}, tmp_path / "dcp"

    def start(checkpoint):
        return dcp.async_save(state, checkpoint_id=checkpoint, no_dist=True)

    coordinator.start_save("model", lambda: start(folder), 1, path=[folder])
    coordinator.wait("model", PATIENCE)
    [finished] = await read_events(log, SaveFinished)
    assert finished.digest.startswith("sha256files:")
    (tmp_path / "file").write_text("no folder")
    coordinator.start_save("model", lambda: start(tmp_path / "file" / "dcp"), 2)
    with raises(SaveError, save="model of step 2", __cause__=re.compile("Not a directory")):
        coordinator.wait("model", PATIENCE)
    [failed] = await read_events(log, SaveFailed)
    assert failed.error_type == "NotADirectoryError"
    assert "Traceback" not in failed.message


async def test_what_several_paths_hold_is_digested_and_checked(coordinator, tmp_path, log):
    shard, extra = tmp_path / "step" / "rank_0.pt", tmp_path / "step" / "extra"

    def save():
        extra.mkdir(parents=True)
        (extra / "deep").mkdir()
        (extra / "deep" / "a.bin").write_bytes(b"a" * 10)
        shard.write_bytes(b"b" * 20)
        (tmp_path / "step" / "of_another_rank.pt").write_bytes(b"c")

    coordinator.save_sync(save, 1, path=[shard, extra])
    [finished] = await read_events(log, SaveFinished)
    assert (finished.path, finished.files, finished.bytes) == ("step", ("extra", "rank_0.pt"), 30)
    history = History()
    history.add(finished)
    files = SavedFiles()
    for _, envelope in history.entries:
        files.add(envelope)
    assert files.check(tmp_path) == CheckedFiles(digests=1, sizes=0, gone=0, mismatches=[])
    (extra / "deep" / "a.bin").write_bytes(b"x" * 10)
    [mismatch] = files.check(tmp_path).mismatches
    assert "was changed: its digest is sha256files:" in mismatch


async def test_a_folder_that_a_save_alone_writes_has_a_digest(coordinator, log, tmp_path):
    folder = tmp_path / ".staging" / "epoch_1_step_1_ab"
    folder.mkdir(parents=True)
    coordinator.save_sync(
        lambda: (folder / "model.pt").write_bytes(b"x") and None, 1, path=[folder]
    )
    coordinator.save_sync(lambda: None, 2, path=folder)
    listed, plain = await read_events(log, SaveFinished)
    assert (listed.path, listed.files) == (".staging/epoch_1_step_1_ab", (".",))
    assert listed.digest.startswith("sha256files:")
    assert plain.digest is None


def test_too_many_paths_are_refused_before_anything_is_saved(coordinator, tmp_path):
    with raises(PathCountRefused, count=300, most=MOST_PATHS):
        coordinator.save_async(
            "model", lambda: None, 1, path=[tmp_path / f"{n}" for n in range(300)]
        )
    with raises(PathCountRefused, count=0):
        coordinator.save_async("model", lambda: None, 1, path=[])


def test_the_commit_needs_no_loop_and_bears_one(coordinator, log):
    import anyio

    coordinator.register_and_monitor_blocking(1, checkpoint_thread_count=2)

    async def inside():
        coordinator.register_and_monitor_blocking(2, checkpoint_thread_count=2)
        return await read_events(log, StepCommitted)

    with ThreadPoolExecutor(1):
        assert [event.step for event in anyio.run(inside)] == [1, 2]


def _raise(error):
    raise error
