"""The pipeline around a test: a reducer as a process or as a task, and what it announces."""

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from tests.support.event_histories import committed, opened, part
from tests.support.waits import PATIENCE, child, until
from trinity_events.archive import Recording, read_recording, record_run
from trinity_events.coordinator import CheckpointCoordinator
from trinity_events.log import (
    AsyncPublisher,
    Publisher,
    RedisEventLog,
    Stream,
    SyncEventLog,
    new_producer,
    position,
)
from trinity_events.reducer import ArchiveLimits, FoldLimits, Policy, reduce_run
from trinity_events.reducer.report_intake import ReportIntake
from trinity_events.server import connect, open_client
from trinity_schemas import (
    SaveGranted,
    StepFailed,
    StepReady,
    StepSuperseded,
    VersionRetired,
    decode_envelope,
)

TWO_SEGMENTS = ArchiveLimits(server_events=0, server_announcements=0)
"""Limits by which the log is trimmed to its two newest segments, however short they are."""


def trimming(snapshot_entries, archive=TWO_SEGMENTS, **options):
    """The policy of a reducer that archives and trims so often."""
    fold = FoldLimits(snapshot_entries=snapshot_entries)
    return Policy(fold=fold, archive=archive, **options)


@contextmanager
def reducer_process(redis_url, run_id, root, *options, stderr=subprocess.DEVNULL):
    """The reducer as users start it."""
    command = [
        *(sys.executable, "-m", "trinity_events", "reducer"),
        *("--run", run_id, "--redis-url", redis_url, "--checkpoint-root", str(root), *options),
    ]
    with child(command, stderr=stderr) as process:
        yield process


@asynccontextmanager
async def reducer_task(redis_url, run_id, root=None, policy=Policy()):  # noqa: B008 - it is frozen
    """The reducer as a task, ended as its process ends it: by a cancel scope.

    Not in a task group, since fixtures are torn down in another task; and not by task.cancel(),
    which asyncio.wait_for of Python 3.11, that redis-py sends with, may swallow.
    """
    scope = anyio.CancelScope()

    async def reduce():
        with scope:
            await reduce_run(own, run_id, root, policy=policy)

    async with connect(redis_url, retry=False) as own:
        task = asyncio.create_task(reduce())
        try:
            yield
        finally:
            scope.cancel()
            await task


async def register_saves(config, step, *, state_dicts, others):
    """Commit a step's saves as the trainer does, once they are dispatched."""
    log = SyncEventLog(open_client(config.redis_url), config.run_id)
    publisher = Publisher(log, config.epoch, new_producer("trainer"))
    coordinator = CheckpointCoordinator(publisher)
    await coordinator.register_and_monitor(
        step, state_dict_thread_count=state_dicts, checkpoint_thread_count=others
    )
    publisher.close()
    log.close()


OUTCOMES = (StepReady, StepFailed, StepSuperseded, VersionRetired, SaveGranted)
"""Announcements about steps and saves; the others repeat what the trainer published."""


async def announced(log: RedisEventLog, count: int) -> list[StepReady]:
    """The announced outcomes, once there are ``count`` at least."""
    with anyio.fail_after(PATIENCE):
        while len(events := await outcomes(log)) < count:
            await anyio.sleep(0.01)
    return events


async def outcomes(log) -> list:
    """The outcomes that were announced so far."""
    entries = await log.read(stream=Stream.ANNOUNCEMENTS, limit=100_000)
    events = [decode_envelope(entry.payload).event for entry in entries]
    return [event for event in events if isinstance(event, OUTCOMES)]


async def reports_accepted(log: RedisEventLog) -> None:
    """Wait until the reducer has moved all reports of now into the events."""

    async def accepted():
        return not await log.has_reports()

    await until(accepted)


async def accept_reports(log: RedisEventLog) -> None:
    """Move all reports of now into the events, where no reducer runs, as a leader would."""
    token, _ = await log.lead(60)
    assert token, "a reducer leads: wait for reports_accepted"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ReportIntake(log, token).run)
        await reports_accepted(log)
        tasks.cancel_scope.cancel()
    await log.renew(token, 0)


async def folded(log: RedisEventLog) -> None:
    """Wait until the reducer has folded all that is in the log, or was reported to it, now."""
    await reports_accepted(log)
    last = position(await log.last_id())
    await until(lambda: _reached(log, last))


async def _reached(log: RedisEventLog, last: tuple[int, int]) -> bool:
    return position((await log.load())[1]) >= last


async def events_of(log: RedisEventLog, kind) -> list:
    """The events of one type that were published."""
    envelopes = [decode_envelope(entry.payload) for entry in await log.read(limit=100_000)]
    return [envelope for envelope in envelopes if isinstance(envelope.event, kind)]


async def publish_steps(publisher: AsyncPublisher, steps) -> None:
    for step in steps:
        await publisher.publish(opened(step))
        await publisher.publish(part(step))
        await publisher.publish(committed(step, "weights"))


async def count_announcements(log: RedisEventLog) -> int:
    return len(await outcomes(log))


async def recorded(log, archive=None) -> Recording:
    """A run's log by way of a file, its parts as lists."""
    with TemporaryDirectory() as room:
        path = Path(room) / "log.jsonl"
        await record_run(log, path, archive)
        recording = read_recording(path)
        return Recording(recording.header, *(list(part) for part in recording[1:]))


async def is_folded(log):
    return (await log.load())[1] == await log.last_id()
