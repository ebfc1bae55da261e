"""Those who write events: each numbers what it sends and sends it in order."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable

import anyio
import redis
import redis.asyncio

from trinity_schemas import (
    Envelope,
    Event,
    Producer,
    RunOpened,
    RunResumed,
    decode_envelope,
    encode,
    event_tag,
)

from ..errors import PublishError
from .base import EventLog
from .index import add_run
from .redis_log import RedisEventLog
from .sync_log import SyncEventLog


def new_producer(role: str, rank: int = 0) -> Producer:
    """A producer on this host, with an incarnation that was never used before."""
    return Producer(
        role=role, rank=rank, node=socket.gethostname(), incarnation=secrets.token_hex(8)
    )


class _Stamp:
    """Puts events into envelopes, numbered from 1."""

    def __init__(self, run_id: str, epoch: int, producer: Producer) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.producer = producer
        self._sequence = 0

    def next(self, event: Event) -> bytes:
        envelope = Envelope(
            run_id=self.run_id,
            epoch=self.epoch,
            producer=self.producer,
            sequence=self._sequence + 1,
            occurred_at=time.time(),
            event=event,
        )
        payload = encode(envelope)
        # Constraints are checked where bytes are read: better here, once, than by every reader.
        decode_envelope(payload)
        self._sequence += 1
        return payload


class Publisher:
    """Publishes from any thread. A retry after an ambiguous reply is a duplicate to the fold."""

    def __init__(self, log: SyncEventLog, epoch: int, producer: Producer) -> None:
        self.log = log
        self._stamp = _Stamp(log.run_id, epoch, producer)
        self._lock = threading.Lock()

    @property
    def run_id(self) -> str:
        """The run that it publishes to."""
        return self._stamp.run_id

    @property
    def epoch(self) -> int:
        """The epoch that it was given."""
        return self._stamp.epoch

    @property
    def producer(self) -> Producer:
        """Who it publishes as."""
        return self._stamp.producer

    def publish(self, event: Event) -> str:
        """Append the event; returns its entry id.

        Raises:
            PublishError: when no server takes it.
            ContractError: when the event breaks the contract.
        """
        with self._lock:
            try:
                return self.log.append(self._stamp.next(event))
            except redis.RedisError as error:
                raise _not_published(event, self.run_id, error) from error


class AsyncPublisher:
    """As :class:`Publisher`, for asynchronous code."""

    def __init__(self, log: EventLog, epoch: int, producer: Producer) -> None:
        self.log = log
        self._stamp = _Stamp(log.run_id, epoch, producer)
        self._lock = anyio.Lock()

    @property
    def epoch(self) -> int:
        """The epoch that it was given."""
        return self._stamp.epoch

    async def publish(self, event: Event) -> str:
        """Append the event; returns its entry id. Raises as :meth:`Publisher.publish`."""
        async with self._lock:
            try:
                return await self.log.append(self._stamp.next(event))
            except redis.RedisError as error:
                raise _not_published(event, self.log.run_id, error) from error


async def open_run(
    client: redis.asyncio.Redis,
    run_id: str,
    *,
    resume_from: int | None = None,
    config: str | None = None,
) -> int:
    """Take a new epoch of the run, from its beginning or from a step; returns the epoch.

    ``config`` is JSON for the run's other processes: no URLs, no secrets, no absolute paths.
    Listed in the index first: a crash in between leaves an empty run, never an unlisted one.
    And again after: a reducer that let go of the run just before hears of it.
    """
    await add_run(client, run_id)
    log = RedisEventLog(client, run_id)
    event: Event = RunOpened(config=config)
    if resume_from is not None:
        event = RunResumed(step=resume_from, config=config)
    epoch = await log.open_epoch(opening(run_id, event))
    await add_run(client, run_id)
    return epoch


def opening(run_id: str, event: Event) -> Callable[[int], bytes]:
    """What opens a run: the event in its envelope, for the epoch that will be taken."""

    def payload(epoch: int) -> bytes:
        # A producer of its own for each attempt: an epoch that was taken meanwhile is no gap.
        return _Stamp(run_id, epoch, new_producer("trainer")).next(event)

    return payload


def _not_published(event: Event, run_id: str, error: Exception) -> PublishError:
    return PublishError(f"{event_tag(event)} of run {run_id} was not published: {error}")
