"""``trinity-events delete`` takes what is over, whole, and nothing else."""

import pytest

from tests.support.errors import raises
from tests.support.pipeline import folded, publish_steps, reducer_task
from tests.support.waits import until
from trinity_events.archive import Archive
from trinity_events.log import ORIGIN, Stream, list_runs, open_run
from trinity_events.log.redis.deletion import RunInUse, delete_run
from trinity_events.record.files import RECORD, RecordFile
from trinity_schemas import RunClosed, RunKeys, explorer_key, grant_key, heartbeat_key


@pytest.fixture
async def closed_run(publisher, log, redis_url, run_id, tmp_path):
    async with reducer_task(redis_url, run_id, tmp_path):
        await publish_steps(publisher, [1, 2])
        await publisher.publish(RunClosed(reason="finished", step=2))
        await folded(log)
        archive = Archive(tmp_path / run_id, run_id)
        await until(lambda: archive.through(Stream.EVENTS) != ORIGIN)
    await log._redis.delete(log.keys.leader)
    return run_id


async def keys_of(client, run_id):
    return sorted([key async for key in client.scan_iter(match=f"trinity:{{{run_id}}}:*")])


async def test_a_run_that_is_over_is_deleted_whole_and_no_other_is(
    cli, client, closed_run, redis_url, tmp_path
):
    await open_run(client, f"{closed_run}.1")
    for key in (heartbeat_key(closed_run, "x"), grant_key(closed_run, "y")):
        await client.set(key, 1)
    others = await keys_of(client, f"{closed_run}.1")
    shown = cli("delete", closed_run, "--yes", "--checkpoint-root", str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"run {closed_run} is deleted: ")
    assert await keys_of(client, closed_run) == []
    assert await keys_of(client, f"{closed_run}.1") == others
    runs = await list_runs(client)
    assert closed_run not in runs and f"{closed_run}.1" in runs
    assert (tmp_path / closed_run / "log").is_dir(), "the archive stays"
    assert "there is no run" in cli("status", closed_run).stderr


async def test_its_folder_goes_with_it_if_that_is_asked_for(cli, closed_run, tmp_path):
    record = tmp_path / closed_run / RECORD
    record.mkdir(mode=0o700)
    (record / RecordFile(1, 1, 0).name).touch()
    shown = cli("delete", closed_run, "-y", "--checkpoints", "--checkpoint-root", str(tmp_path))
    assert shown.stdout.endswith(f"keys, and {tmp_path / closed_run}\n")
    assert not (tmp_path / closed_run).exists()


async def test_recorded_rollouts_that_stay_are_named(cli, closed_run, tmp_path):
    record = tmp_path / closed_run / RECORD
    record.mkdir(mode=0o700)
    shown = cli("delete", closed_run, "-y", "--checkpoint-root", str(tmp_path))
    assert shown.stdout.endswith(
        f"its recorded rollouts stay in {record}: delete them with rm -r\n"
    )
    assert record.is_dir()


async def test_the_folder_of_another_log_is_not_deleted(cli, client, closed_run, tmp_path):
    mark = tmp_path / closed_run / ".belongs_to"
    mark.write_text(mark.read_text().replace('"log":"1', '"log":"2'))
    await client.delete(RunKeys.of(closed_run).identity)
    shown = cli("delete", closed_run, "-y", "--checkpoints", "--checkpoint-root", str(tmp_path))
    assert shown.returncode == 1
    assert "belongs to another log" in shown.stderr
    assert await keys_of(client, closed_run)


async def test_a_run_that_goes_on_stays(cli, client, publisher, run_id):
    await client.set(explorer_key(run_id, 1, 0), 1)
    shown = cli("delete", run_id, "--yes")
    assert shown.returncode == 1
    assert shown.stderr.startswith(f"error: run {run_id} is open, and a process of it was heard of")
    assert await list_runs(client)


async def test_it_asks_before_it_deletes(cli, client, closed_run):
    shown = cli("delete", closed_run)
    assert shown.returncode == 1
    assert shown.stderr.startswith(f"error: this deletes run {closed_run} for good: confirm it")
    assert await keys_of(client, closed_run)


async def test_what_is_led_or_has_gone_on_meanwhile_stays(client, closed_run, log):
    last = await log.last_id()
    with raises(RunInUse, run_id=closed_run, fault="published", after=ORIGIN):
        await delete_run(client, closed_run, ORIGIN)
    await client.set(log.keys.leader, "7")
    with raises(RunInUse, run_id=closed_run, fault="led"):
        await delete_run(client, closed_run, last)
    await client.delete(log.keys.leader)
    assert await delete_run(client, closed_run, last) > 0
    assert await log.last_id(Stream.EVENTS) == ORIGIN
    assert await delete_run(client, closed_run, ORIGIN) == 0, "it can be repeated"
