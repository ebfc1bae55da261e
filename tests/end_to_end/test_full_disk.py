"""Disks that are full or cannot be written: one sentence, and nothing else lost."""

import re
import subprocess
import threading
from contextlib import contextmanager
from functools import partial

import anyio
import anyio.to_thread
import pytest
import redis

from tests.support.errors import raises
from tests.support.event_histories import History, committed, finished, registration, slot, started
from tests.support.pipeline import announced, reducer_task, until
from tests.support.waits import PATIENCE
from trinity_events import CheckpointCoordinator
from trinity_events.coordinator import DiskTooFull, PlannedSave
from trinity_events.core import plan_files
from trinity_events.errors import EmbeddedServerUnusable, PublishError, SaveError
from trinity_events.log import (
    AsyncPublisher,
    Publisher,
    RedisEventLog,
    SyncEventLog,
    new_producer,
    open_run,
)
from trinity_events.reducer import CheckpointFiles
from trinity_events.reducer.background_job import BackgroundJob
from trinity_events.server import EmbeddedServer, connect, open_client
from trinity_events.server.embedded import ServerTimeouts
from trinity_schemas import SaveFailed, SaveGranted, SaveRequested, decode_envelope


@contextmanager
def mounted(folder, size):
    """A file system of its own, which is gone on leaving."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("a small file system cannot be mounted without privileges")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    with mounted(tmp_path / "small", "64k") as folder:
        yield folder


@pytest.fixture
def log_disk(tmp_path):
    """A file system of 2 MiB, with room for a log."""
    with mounted(tmp_path / "log", "2m") as folder:
        yield folder


def fill(folder):
    with pytest.raises(OSError, match="No space left"):
        (folder / "filler").write_bytes(b"x" * 10_000_000)


@pytest.mark.heavy
@pytest.mark.processes
def test_a_save_on_a_full_disk_is_a_failed_save_and_one_sentence(sync_client, run_id, small_disk):
    publisher = Publisher(SyncEventLog(sync_client, run_id), 1, new_producer("actor"))
    coordinator = CheckpointCoordinator(publisher, small_disk)
    path = small_disk / "model.pt"
    coordinator.save_async("model", lambda: path.write_bytes(b"x" * 200_000), 5, path=path)
    with raises(SaveError, save="model of step 5", __cause__=re.compile("No space left")):
        coordinator.wait_all()
    failed = decode_envelope(publisher.log.read()[-1].payload).event
    assert isinstance(failed, SaveFailed)
    assert "No space left on device" in failed.message
    path.unlink()
    sized = PlannedSave(save=lambda: path.write_bytes(b"x" * 200_000), nbytes=200_000)
    with raises(DiskTooFull, folder=path, needed=200_000, free=1 << 16):
        coordinator.save_sync(sized, 6, name="model", path=path)
    assert not path.exists(), "nothing was written"


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.server
def test_a_server_without_room_says_so_for_its_own_log_is_empty(small_disk):
    fill(small_disk)
    server = EmbeddedServer(small_disk / "home", timeouts=ServerTimeouts(start=1.0)).attached()
    with raises(
        EmbeddedServerUnusable, fault="start", reason=re.compile("/small/home/redis is full")
    ):
        server.__enter__()


async def refusing(log):
    """Append until the server refuses it: what it buffered when the disk became full it takes."""

    async def append():
        while True:
            await log.append(b"x" * 4096)
            await anyio.sleep(0.01)

    with pytest.raises(redis.ResponseError, match="MISCONF"), anyio.fail_after(PATIENCE):
        await append()


TRUTH = r"MISCONF .*No space left on device.*make room on its disk"


@pytest.mark.heavy
@pytest.mark.server
async def test_a_full_log_disk_is_told_as_it_is_and_the_log_can_still_be_read(
    log_disk, tmp_path, cli
):
    server = EmbeddedServer(log_disk / "home")
    env = {"TRINITY_HOME": str(server.home)}
    recorded, fed = str(tmp_path / "run.jsonl"), committed(1, "weights")
    reading = (
        *(
            ("runs",),
            ("status", "run"),
            ("explain", "run", "1"),
            ("tail", "run"),
            ("replay", "run"),
        ),
        *(("verify", "run"), ("export", "run", "--output", recorded)),
    )

    async def read_all():
        for command in reading:
            shown = await anyio.to_thread.run_sync(partial(cli, *command, env=env))
            assert shown.returncode == 0, (command, shown.stdout, shown.stderr)

    with server.attached() as url:
        async with connect(url) as client, reducer_task(url, "run"):
            log = RedisEventLog(client, "run")
            epoch = await open_run(client, "run")
            await AsyncPublisher(log, epoch, new_producer("actor")).publish(started(1))
            fill(log_disk)
            await refusing(log)
            with EmbeddedServer(server.home).attached() as same:
                assert same == url, "a command attaches"
            await read_all()
            with pytest.raises(PublishError, match=TRUTH):
                await AsyncPublisher(log, epoch, new_producer("trainer"), deadline=1).publish(fed)
            with pytest.raises(PublishError, match=TRUTH):
                await open_run(client, "run", deadline=1)
            publisher = Publisher(SyncEventLog(open_client(url), "run"), epoch, new_producer("a"))
            publisher.publish(fed)
            with pytest.raises(PublishError, match=TRUTH):
                await anyio.to_thread.run_sync(publisher.flush, 2.0)
            (log_disk / "filler").unlink()
            await anyio.to_thread.run_sync(publisher.flush, PATIENCE)
            publisher.log.close()
    fill(log_disk)
    await read_all()


@pytest.mark.heavy
@pytest.mark.processes
def test_pointers_wait_for_room_and_are_then_right(small_disk, caplog):
    files = CheckpointFiles(small_disk, "run")
    history = History()
    history.add(committed(7, "state_dict", registration()))
    history.add(finished(7))
    (small_disk / "run" / "global_step_7").mkdir(parents=True)
    (small_disk / "run" / "global_step_7" / "model.pt").touch()
    plan = plan_files(history.fold()[0].state)
    fill(small_disk)
    files.reconcile(plan)
    path = small_disk / "run" / "latest_state_dict_iteration.txt"
    assert not path.exists() or path.read_text() == "7", "never half a number"
    assert "No space left on device" in caplog.text or path.exists()
    (small_disk / "filler").unlink()
    files.reconcile(plan)
    assert path.read_text() == "7"


async def test_a_disk_that_hangs_holds_up_no_grant(
    client, log, sync_client, redis_url, run_id, tmp_path, monkeypatch
):
    hangs, reached = threading.Event(), threading.Event()
    reconcile = CheckpointFiles.reconcile

    def slow(self, plan):
        reached.set()
        hangs.wait(PATIENCE)
        reconcile(self, plan)

    monkeypatch.setattr(CheckpointFiles, "reconcile", slow)
    epoch = await open_run(client, run_id, save_strategy="single_thread")
    worker = AsyncPublisher(log, epoch, new_producer("actor"))
    own = SyncEventLog(sync_client, run_id)
    pointer = tmp_path / run_id / "latest_state_dict_iteration.txt"
    (tmp_path / run_id / "global_step_1").mkdir(parents=True)
    (tmp_path / run_id / "global_step_1" / "model.pt").touch()
    async with reducer_task(redis_url, run_id, tmp_path):
        try:
            await until(reached.is_set)
            await worker.publish(committed(1, "state_dict", registration()))
            for save_id in ("first", "second"):
                await worker.publish(SaveRequested(save_id=save_id, slot=slot(1)))
            assert await anyio.to_thread.run_sync(own.granted, "first", PATIENCE)
            await worker.publish(finished(1, "first"))
            assert await anyio.to_thread.run_sync(own.granted, "second", PATIENCE)
            assert not pointer.exists()
        finally:
            hangs.set()
        await until(lambda: pointer.exists() and pointer.read_text() == "1")
    granted = [event.save_id for event in await announced(log, 3) if isinstance(event, SaveGranted)]
    assert granted == ["first", "second"]


async def test_of_the_chores_that_wait_only_the_newest_is_done():
    chore, done, goes_on = BackgroundJob("testing"), [], anyio.Event()

    def task(number):
        async def act():
            done.append(number)
            await goes_on.wait()

        return act

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(chore.run)
        chore.submit_latest(task(1))
        await until(lambda: done == [1])
        for number in (2, 3, 4):
            chore.submit_latest(task(number))
        assert not chore.is_idle
        goes_on.set()
        with anyio.fail_after(PATIENCE):
            await chore.until_idle()
        assert done == [1, 4]
        tasks.cancel_scope.cancel()


async def test_a_chore_that_fails_says_so_once_and_the_next_is_tried(caplog):
    chore, broken = BackgroundJob("testing"), [True]

    async def act():
        if broken:
            raise OSError(28, "No space left on device")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(chore.run)

        async def wish_and_wait():
            chore.submit_latest(act)
            with anyio.fail_after(PATIENCE):
                await chore.until_idle()

        for _ in range(3):
            await wish_and_wait()
        assert caplog.text.count("testing failed") == 1
        broken.clear()
        await wish_and_wait()
        broken.append(True)
        await wish_and_wait()
        assert caplog.text.count("testing failed") == 2, "after it went well it is news again"
        tasks.cancel_scope.cancel()
