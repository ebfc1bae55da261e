"""End of a run's processes: signals, the close of the log, errors as sentences."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import redis.asyncio
from redis.exceptions import RedisClusterException

from trinity_events.errors import TrinityError
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, position
from trinity_events.server import Deadline
from trinity_events.system.error_text import first_error, format_cause, ungrouped
from trinity_events.system.signals import cancelled_by_signals, ending_signals
from trinity_schemas import RunClosed

from ..config.train_config import RunConfig
from .next_command import next_command
from .notice import NOTICE_SIGNALS, Notice

_SHORT_DEADLINE = 3.0
"""Seconds to close a run that failed or was interrupted: supervisors kill after ten."""


class Interrupted(TrinityError):
    """A signal asked the process to end.

    Attributes:
        run_id: The run.
        signal: Number of the signal.
    """

    run_id: str
    signal: int
    text = "run {run_id} was interrupted; look at what it did with: trinity-events replay {run_id}"

    @property
    def exit_status(self) -> int:
        """Status with which the process ends."""
        return 128 + self.signal


@asynccontextmanager
async def interruptible(
    run_id: str, notice: Notice | None = None
) -> AsyncIterator[Callable[[], None]]:
    """Turn signals that ask the process to end into an orderly end of the block.

    Yields a function that ends the block as a signal does.

    Args:
        run_id: The run.
        notice: Receives each signal first, and may take it as a notice; None takes none.

    Raises:
        Interrupted: after the block has ended, when that is why.
    """
    received: list[int] = []
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def record(number: int) -> bool:
        received.append(number)
        if number == signal.SIGHUP:
            _leave(terminals)
        return notice is not None and notice.receive(number)

    with ungrouped():
        async with cancelled_by_signals(record, NOTICE_SIGNALS) as end:
            yield end
    if received:
        for number in (signal.SIGINT, *ending_signals(), *NOTICE_SIGNALS):
            signal.signal(number, signal.SIG_IGN)  # what is left to do is to say so
        # The first signal: later ones only repeat it, as users and supervisors do.
        raise Interrupted(run_id, received[0])


def _leave(terminals: list[int]) -> None:
    """Discard output to a terminal that is gone, where writing is an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in terminals:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


@asynccontextmanager
async def closing(
    client: redis.asyncio.Redis,
    config: RunConfig,
    command: str | None = None,
    notice: Notice | None = None,
) -> AsyncIterator[None]:
    """Close the run at the end of the block, also after an error, and wait for the reducer.

    Args:
        client: The server of the log.
        config: The run.
        command: Command that resumes it from its newest checkpoint.
        notice: Notice of the end, whose sentence the close of an interrupted run has.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, anyio.get_cancelled_exc_class()):
            sentence = None if notice is None else notice.sentence
            closed = RunClosed(reason="interrupted", error=sentence, command=command)
        else:
            following = next_command(command, first_error(error))
            closed = RunClosed(
                reason="failed",
                error=format_cause(error),
                command=following,
                is_lasting=command is not None and following is None,
            )
        # What happened is worth more than that the log could not be told of it.
        with suppress(TrinityError, redis.RedisError, RedisClusterException, OSError):
            await _close(client, config, closed, _SHORT_DEADLINE)
        raise
    finished = RunClosed(reason="finished", step=config.steps)
    await _close(client, config, finished, config.sync.timeout)


async def _close(
    client: redis.asyncio.Redis, config: RunConfig, closed: RunClosed, deadline: float
) -> None:
    log = RedisEventLog(client, config.run_id)
    missing = f"the end of run {config.run_id} was not folded"
    # Shielded: an interrupted run is closed too.
    with anyio.CancelScope(shield=True):
        wait = Deadline(deadline, missing, "is its reducer running?")
        publisher = AsyncPublisher(log, config.epoch, new_producer("launcher"), deadline=deadline)
        last = position(await publisher.publish(closed))
        # Polled: that a snapshot was written is no entry of the log.
        while position((await wait.retry(log.load))[1]) < last:  # noqa: ASYNC110
            await anyio.sleep(0.02)
        # The caller ends the reducer next. Reports that it has not accepted would be missing from
        # the summary, and their explorers would be shown as lost.
        wait.missing = f"the last reports of the explorers of run {config.run_id} were not accepted"
        while await wait.retry(log.has_reports):  # noqa: ASYNC110
            await anyio.sleep(0.02)
