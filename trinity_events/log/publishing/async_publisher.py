"""Publisher for asynchronous code, and the opening of a run."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import redis
import redis.asyncio
from msgspec import Struct

from trinity_schemas import (
    REPORTER_ROLE,
    ChosenTransport,
    Event,
    Producer,
    RunOpened,
    RunResumed,
    SaveStrategy,
    SettingChange,
    SkippedCheckpoint,
    StepRef,
)
from trinity_schemas.events import MOST_CHANGES, MOST_SKIPPED

from ...errors import KeyConflict, PermissionDenied, PublishError
from ..base import EventLog
from ..redis.error_replies import reply_text
from ..redis.event_log import RedisEventLog
from ..redis.run_index import add_run
from ..retry import SLOW, backoff_delays, is_transient
from .publisher import DEADLINE, EnvelopeFactory, format_unpublished, new_producer

T = TypeVar("T")

_LONGEST_PAUSE = 1.0


class AsyncPublisher:
    """Publishes from asynchronous code, and waits until each event is in the log.

    After a lost reply it sends the event again; the fold ignores the duplicate.

    Args:
        log: The run's log.
        epoch: The epoch of this process.
        producer: Identity of this publisher, which no other publisher may share.
        deadline: Seconds for which an event waits for a server that is away or full.
    """

    def __init__(
        self, log: EventLog, epoch: int, producer: Producer, *, deadline: float = DEADLINE
    ) -> None:
        self.log = log
        self._stamp = EnvelopeFactory(log.run_id, epoch, producer)
        self._append = log.append_report if producer.role == REPORTER_ROLE else log.append
        self._deadline = deadline
        self._lock = anyio.Lock()

    @property
    def epoch(self) -> int:
        """The epoch that its events carry."""
        return self._stamp.epoch

    async def publish(self, event: Event) -> str:
        """Append the event; return its entry id.

        Raises:
            PublishError: if no server took it within the deadline, or the server refuses it.
            ContractError: if the event breaks the contract.
        """
        give_up = time.monotonic() + self._deadline
        run_id = self.log.run_id
        what = format_unpublished(run_id, event)
        async with self._lock:
            # The lock may have taken the whole time: an event ahead of this one waits for the
            # server.
            if time.monotonic() >= give_up:
                raise PublishError(run_id, what, "what was published before it took too long")
            payload = self._stamp.next(event)
            try:
                return await _within(
                    give_up, lambda: self._append(payload), run_id, what, deadline=self._deadline
                )
            except (redis.RedisError, OSError, KeyConflict) as error:
                # Refused, so not in the log. After a lost connection it may be: keep the number.
                self._stamp.undo()
                raise PublishError(run_id, what, reply_text(error)) from error


class Resumption(Struct, frozen=True, kw_only=True):
    """Checkpoint that a run resumes from, and what differs from the epoch that wrote it."""

    checkpoint: StepRef
    changed: tuple[SettingChange, ...] = ()
    """Settings with another value."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """Newer checkpoints that were passed over, newest first."""


async def open_run(  # noqa: PLR0913  # what an opening event has, each by its name
    client: redis.asyncio.Redis,
    run_id: str,
    *,
    resume_from: int | StepRef | Resumption | None = None,
    config: str | None = None,
    save_strategy: SaveStrategy = "unrestricted",
    transport: ChosenTransport | None = None,
    command: str | None = None,
    above: int = 0,
    deadline: float = 60.0,
) -> int:
    """Open the next epoch of the run, from its beginning or from a step; return the epoch.

    ``resume_from`` is a step, or the checkpoint of a step by the epoch that wrote it, alone or with
    what differs from then.
    ``config`` is JSON for the run's other processes: no URLs, no secrets, no absolute paths.
    ``save_strategy`` decides which saves may run at the same time. ``transport`` shows users the
    transport of the weights and the reason for it. ``command`` shows them how to continue the run,
    without passwords. ``deadline`` is in seconds.
    ``above`` is the newest epoch of the folded log, if the caller has folded it. An event may have
    opened it without taking its number; the opening then waits until a reducer has raised the
    counter.

    The run is listed in the index before its first event: a crash in between leaves an empty run,
    never an unlisted one. It is listed again after: a reducer that just dropped the run finds it.

    Raises:
        PublishError: if no server took the event in time.
        PermissionDenied: if the server's access rules forbid it.
    """
    log = RedisEventLog(client, run_id)
    event: Event = RunOpened(
        config=config, save_strategy=save_strategy, transport=transport, command=command
    )
    if isinstance(resume_from, StepRef):
        resume_from = Resumption(checkpoint=resume_from)
    if resume_from is not None:
        resumption = resume_from if isinstance(resume_from, Resumption) else None
        event = RunResumed(
            step=resume_from if isinstance(resume_from, int) else resume_from.checkpoint.step,
            checkpoint=None if resumption is None else resumption.checkpoint,
            config=config,
            save_strategy=save_strategy,
            transport=transport,
            command=command,
            changed=() if resumption is None else resumption.changed[:MOST_CHANGES],
            skipped=() if resumption is None else resumption.skipped[:MOST_SKIPPED],
        )
    opening = opening_envelope(run_id, event)
    give_up = time.monotonic() + deadline

    async def patiently(step: Callable[[], Awaitable[T]]) -> T:
        what = f"run {run_id} was not opened"
        return await _within(give_up, step, run_id, what, deadline=deadline)

    try:
        await patiently(lambda: add_run(client, run_id))
        epoch = await patiently(lambda: log.open_epoch(opening, above=above))
        await patiently(lambda: add_run(client, run_id))
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise PermissionDenied(str(error), "opening", run_id=run_id) from error
    return epoch


def opening_envelope(run_id: str, event: Event) -> Callable[[int], bytes]:
    """Return a function that encodes the first event of an epoch, given the epoch."""

    def payload(epoch: int) -> bytes:
        # A new producer for each attempt: a lost race for the epoch must leave no gap.
        return EnvelopeFactory(run_id, epoch, new_producer("trainer")).next(event)

    return payload


async def _within(
    give_up: float, step: Callable[[], Awaitable[T]], run_id: str, what: str, *, deadline: float
) -> T:
    """Return the result of a request; retry it while its error is transient.

    Raises PublishError after the deadline, and any other error at once.
    """
    fault: Exception | None = None
    for pause in backoff_delays(_LONGEST_PAUSE):
        with anyio.move_on_after(give_up - time.monotonic()):
            try:
                return await step()
            except Exception as error:
                if not is_transient(error):
                    if fault is not None:  # an earlier attempt may have been done
                        raise PublishError(run_id, what, reply_text(error)) from error
                    raise
                fault = error
        remaining = give_up - time.monotonic()
        if remaining <= 0:
            break
        await anyio.sleep(min(pause, remaining))
    why = SLOW if fault is None else reply_text(fault)
    raise PublishError(run_id, what, why, deadline)
