"""A run's folder belongs to one log; another of that name changes nothing in it."""

import secrets
import shutil

import anyio
import anyio.to_thread
import msgspec
import pytest
from msgspec.structs import replace

from tests.support import pipeline
from tests.support.event_histories import committed, finished, registration
from tests.support.pipeline import is_folded, publish_steps, recorded, trimming, until
from tests.support.redis_servers import servers
from trinity_events.archive import Archive, import_recording, read_recording, record_run
from trinity_events.checkpoints.layout import BELONGS_TO
from trinity_events.log import (
    ORIGIN,
    AsyncPublisher,
    RedisEventLog,
    Stream,
    new_producer,
    open_run,
)
from trinity_events.reducer import Policy, ReducerTimeouts
from trinity_events.server import EmbeddedServer, connect
from trinity_schemas import RunClosed

pytestmark = pytest.mark.server

ANOTHER = "belongs to another log of run"


def reducer_task(url, run_id, root, policy=Policy()):  # noqa: B008 - it is frozen
    """The reducer as a task, which soon tries again what a user must repair."""
    policy = replace(policy, timeouts=ReducerTimeouts(fault_retry=0.2))
    return pipeline.reducer_task(url, run_id, root, policy)


@pytest.fixture
def elsewhere(tmp_path):
    """The URL of another server."""
    with EmbeddedServer(tmp_path / "elsewhere").attached() as url:
        yield url


async def opened(client, run_id):
    """A run on another server: its log, and its trainer's publisher."""
    epoch, log = await open_run(client, run_id), RedisEventLog(client, run_id)
    return log, AsyncPublisher(log, epoch, new_producer("trainer"))


async def save(publisher, folder, step):
    """A whole checkpoint, in a staged folder of its own."""
    name = f".staging/epoch_1_step_{step}_{secrets.token_hex(4)}"
    (folder / name).mkdir(parents=True)
    (folder / name / "model.pt").write_text(name)
    await publisher.publish(committed(step, "checkpoint", registration("checkpoint")))
    path = f"{name}/model.pt"
    save = finished(step, f"s{step}", kind="checkpoint", path=path, nbytes=len(name))
    await publisher.publish(save)


def steps(folder):
    return sorted(int(path.name[12:]) for path in folder.glob("global_step_*"))


def content(folder):
    """What is in a folder, without what a trainer only stages there."""
    return {
        path: path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
        if ".staging" not in path.parts
    }


async def test_two_servers_with_one_root_and_one_run_id_take_nothing_from_each_other(
    publisher, redis_url, run_id, tmp_path, elsewhere, caplog
):
    root = tmp_path / "root"
    folder = root / run_id
    async with reducer_task(redis_url, run_id, root, Policy(keep_checkpoints=1)):
        await save(publisher, folder, 3)
        await publisher.publish(RunClosed(reason="finished", step=3))
        await until(lambda: steps(folder) == [3])
        archive = Archive(folder, run_id)
        await until(lambda: archive.through(Stream.ANNOUNCEMENTS) != ORIGIN)
    before = content(folder)
    async with (
        connect(elsewhere) as client,
        reducer_task(elsewhere, run_id, root, Policy(keep_checkpoints=1)),
    ):
        _, second = await opened(client, run_id)
        for step in (7, 8):
            await save(second, folder, step)
        await until(lambda: ANOTHER in caplog.text)
        await anyio.sleep(1.5)
    assert content(folder) == before
    [warning, *_] = [
        record.getMessage() for record in caplog.records if ANOTHER in record.getMessage()
    ]
    for named in (
        str(folder),
        redis_url.removeprefix("unix://"),
        elsewhere.removeprefix("unix://"),
    ):
        assert named in warning
    assert f"--adopt-folder {run_id}" in warning


async def test_a_folder_is_taken_over_when_that_is_asked_for(
    publisher, log, redis_url, run_id, tmp_path, elsewhere, caplog
):
    root = tmp_path / "root"
    folder = root / run_id
    async with reducer_task(redis_url, run_id, root):
        await save(publisher, folder, 3)
        await until(lambda: steps(folder) == [3])
    async with connect(elsewhere) as client:
        there, second = await opened(client, run_id)
        # All are kept: it may remove old folders at any moment, those it has taken over too.
        adopts = Policy(adopt_folders=frozenset({run_id}), keep_checkpoints=0)
        async with reducer_task(elsewhere, run_id, root, adopts):
            await save(second, folder, 8)
            await until(lambda: steps(folder) == [3, 8])
        assert "is taken over" in caplog.text
        async with reducer_task(elsewhere, run_id, root):
            await until(lambda: is_folded(there))
    caplog.clear()
    async with reducer_task(redis_url, run_id, root):
        await until(lambda: ANOTHER in caplog.text)


async def test_the_log_is_known_again_after_a_restart_although_its_beginning_is_trimmed(
    run_id, tmp_path, caplog
):
    root = tmp_path / "root"
    with servers(tmp_path, 1) as [server]:
        async with connect(server.url) as client:
            log, publisher = await opened(client, run_id)
            async with reducer_task(server.url, run_id, root, trimming(10)):
                for step in range(1, 30):
                    await publish_steps(publisher, [step])
                    await until(lambda: is_folded(log))
                    if await log.first_retained_id(Stream.EVENTS) is not None:
                        break
        mark = (root / run_id / BELONGS_TO).read_bytes()
        server.kill()
        server.start()
        async with connect(server.url) as client:
            log = RedisEventLog(client, run_id)
            assert await log.first_retained_id(Stream.EVENTS) is not None
            async with reducer_task(server.url, run_id, root, trimming(10)):
                await publish_steps(AsyncPublisher(log, 1, new_producer("trainer")), [50])
                await until(lambda: is_folded(log))
            # A log of before it was kept which is: told by its archive.
            await client.delete(log.keys.identity)
            (root / run_id / BELONGS_TO).unlink()
            async with reducer_task(server.url, run_id, root, trimming(10)):
                await until((root / run_id / BELONGS_TO).exists)
    assert (root / run_id / BELONGS_TO).read_bytes() == mark
    assert ANOTHER not in caplog.text


async def test_an_imported_run_may_go_on_in_the_folder_of_the_run(
    publisher, log, redis_url, run_id, tmp_path, elsewhere, caplog
):
    root = tmp_path / "root"
    folder = root / run_id
    async with reducer_task(redis_url, run_id, root):
        await save(publisher, folder, 3)
        await until(lambda: steps(folder) == [3])
    await record_run(log, tmp_path / "run.jsonl")
    async with connect(elsewhere) as client:
        await import_recording(client, read_recording(tmp_path / "run.jsonl"))
        there = RedisEventLog(client, run_id)
        async with reducer_task(elsewhere, run_id, root):
            trainer = AsyncPublisher(there, 1, new_producer("trainer"))
            await save(trainer, folder, 4)
            await until(lambda: steps(folder) == [3, 4])
        assert await recorded(there) != await recorded(log)
    assert ANOTHER not in caplog.text


async def test_a_folder_of_before_there_were_marks_is_told_by_its_archive(
    publisher, redis_url, run_id, tmp_path, elsewhere, caplog
):
    root = tmp_path / "root"
    archive = Archive(root / run_id, run_id)
    async with reducer_task(redis_url, run_id, root):
        await publisher.publish(RunClosed(reason="finished"))
        await until(lambda: archive.through(Stream.ANNOUNCEMENTS) != ORIGIN or _has_events(archive))
    (root / run_id / BELONGS_TO).unlink()
    before = content(root / run_id)
    async with connect(elsewhere) as client, reducer_task(elsewhere, run_id, root):
        await opened(client, run_id)
        await until(lambda: ANOTHER in caplog.text)
    assert content(root / run_id) == before
    async with reducer_task(redis_url, run_id, root):
        await until((root / run_id / BELONGS_TO).exists)


def _has_events(archive):
    return archive.through(Stream.EVENTS) != ORIGIN


async def test_a_folder_that_takes_the_place_of_the_runs_meanwhile_is_not_touched(
    publisher, redis_url, run_id, tmp_path, caplog
):
    root, other, theirs = tmp_path / "root", tmp_path / "other", tmp_path / "theirs"
    folder = root / run_id
    async with reducer_task(redis_url, run_id, root, Policy(keep_checkpoints=1)):
        await save(publisher, folder, 3)
        await until(lambda: steps(root / run_id) == [3])
        # It comes whole: the reducer would mark a folder that has no mark yet.
        (theirs / "global_step_1").mkdir(parents=True)
        (theirs / "global_step_1" / ".made_from").touch()
        mark = msgspec.json.decode((folder / BELONGS_TO).read_bytes())
        text = msgspec.json.encode({**mark, "log": "1700000000000-0.0123456789abcdef"})
        (theirs / BELONGS_TO).write_bytes(text)
        folder.rename(other)
        theirs.rename(folder)
        before = content(folder)
        await save(publisher, folder, 4)
        await until(lambda: ANOTHER in caplog.text)
        await anyio.sleep(1.5)
        assert content(root / run_id) == before
        shutil.rmtree(root / run_id)


@pytest.mark.parametrize(
    "garbage", [b"", b"{}", b"\xff", b"[" * 5000, b'{"log":"1-0.a","host":"\\u001b[2J"}']
)
async def test_a_mark_that_cannot_be_read_is_told(
    publisher, redis_url, run_id, tmp_path, caplog, garbage
):
    (tmp_path / run_id).mkdir()
    (tmp_path / run_id / BELONGS_TO).write_bytes(garbage)
    async with reducer_task(redis_url, run_id, tmp_path):
        await until(lambda: f"{tmp_path / run_id} has a mark that cannot be read" in caplog.text)


async def test_a_disk_that_refuses_the_mark_stops_no_run(
    publisher, log, redis_url, run_id, tmp_path, caplog
):
    (tmp_path / run_id).write_text("no folder")
    async with reducer_task(redis_url, run_id, tmp_path):
        await publish_steps(publisher, [1])
        await until(lambda: is_folded(log))
        (tmp_path / run_id).unlink()
        await save(publisher, tmp_path / run_id, 2)
        await until(lambda: steps(tmp_path / run_id) == [2])
    assert (tmp_path / run_id / BELONGS_TO).exists()


async def test_the_demo_does_not_open_a_run_in_the_folder_of_another_log(
    publisher, redis_url, run_id, tmp_path, elsewhere, cli
):
    root = tmp_path / "root"
    async with reducer_task(redis_url, run_id, root):
        await save(publisher, root / run_id, 3)
        await until(lambda: steps(root / run_id) == [3])
    arguments = ("demo", "--run", run_id, "--checkpoint-root", str(root), "--redis-url", elsewhere)
    result = await anyio.to_thread.run_sync(lambda: cli(*arguments, timeout=240))
    assert result.returncode == 1, result.stdout
    assert ANOTHER in result.stderr
    assert "Traceback" not in result.stderr
    async with connect(elsewhere) as client:
        assert not await RedisEventLog(client, run_id).exists(), "it was not opened"
