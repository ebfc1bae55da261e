"""Publisher for synchronous code.

Its events get numbers and envelopes (:class:`EnvelopeFactory`), wait in order within a bound
(:class:`Outbox`), and are sent by a separate thread.

1. Numbers have no gap: an event that is refused uses up none.
2. Events are sent in the order of their numbers, each until the server confirms it. One that was
   sent twice has one number, and the fold ignores the duplicate.
3. No call but a flush or a close waits for the server, and none waits longer than its deadline.
4. The buffer is bounded by events and by bytes.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from functools import cached_property
from weakref import ReferenceType, WeakSet, ref

from trinity_schemas import (
    REPORT_TYPES,
    REPORTER_ROLE,
    Envelope,
    Event,
    Producer,
    decode_envelope,
    encode,
    event_tag,
    reporter_incarnation,
)
from trinity_schemas.envelope import FIRST_VERSION, MEANING_SINCE
from trinity_schemas.trace_context import trace_of

from ...core.decisions.report_checks import ReportRefused
from ...diagnostics.waits import WaitReporter
from ...errors import BufferFull, EventsMissing, PublishError
from ...system.host import get_host_id
from ..redis.error_replies import reply_text
from ..redis.sync_log import SyncEventLog
from ..retry import SLOW, backoff_delays, is_transient

logger = logging.getLogger(__name__)

CAPACITY = 4096
"""Events that a publisher buffers at most while no server takes them."""
CAPACITY_BYTES = 16 << 20
"""Bytes of those events at most."""
DEADLINE = 30.0
"""Seconds for which callers wait for a server that is away, where no configuration says more."""
CLOSE_DEADLINE = 5.0
"""Seconds for which a publisher that is closed after an error waits for its events."""
LONGEST_PAUSE = 1.0
"""Maximum seconds between two attempts to reach a server."""
CLOSED = "its publisher was closed"
EXITING = "this process ends, and can start no thread"
"""Reasons not to publish an event."""
EXIT_DEADLINE = 5.0
"""Seconds that an exiting process waits for the events that its publishers still buffer."""
LINGER = 5.0
"""Seconds for which the sending thread keeps an idle publisher without another user."""
# Events, and bytes, of one script: it holds up the server's other clients while it runs.
_AT_ONCE = 512
_BYTES_AT_ONCE = 1 << 20


def new_producer(role: str, rank: int = 0) -> Producer:
    """Return a producer on this host with a new, random incarnation."""
    incarnation = secrets.token_hex(8)
    if role == REPORTER_ROLE:
        incarnation = reporter_incarnation(rank, incarnation)
    return Producer(role=role, rank=rank, node=socket.gethostname(), incarnation=incarnation)


def format_unpublished(run_id: str, event: Event) -> str:
    """Return the clause of an error that an event of a run was not published."""
    return f"{event_tag(event)} of run {run_id} was not published"


class EnvelopeFactory:
    """Factory of one producer's envelopes, numbered from 1."""

    def __init__(self, run_id: str, epoch: int, producer: Producer) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.producer = producer
        self._sequence = 0

    def next(self, event: Event) -> bytes:
        """Return the encoded event with the next number. A refused event uses up no number.

        An event that no explorer may report is refused here, before the reducer would do so.
        """
        if self.producer.role == REPORTER_ROLE and type(event) not in REPORT_TYPES:
            raise ReportRefused("publisher", self.producer, event_tag(event))
        envelope = Envelope(
            run_id=self.run_id,
            epoch=self.epoch,
            producer=self.producer,
            sequence=self._sequence + 1,
            occurred_at=time.time(),
            event=event,
            schema_version=MEANING_SINCE.get(type(event), FIRST_VERSION),
            trace=trace_of(self.run_id, self.epoch, self.producer.incarnation, event),
            # The host of a sender does not change: one event says it.
            host_id=None if self._sequence else get_host_id(),
        )
        payload = encode(envelope)
        # Decoding checks the constraints: once here, before every reader does.
        decode_envelope(payload)
        self._sequence += 1
        return payload

    def undo(self) -> None:
        """Take the last number back: its event was certainly not sent and must leave no gap."""
        self._sequence -= 1


class Outbox:
    """Payloads that no server confirmed yet, oldest first.

    A sent payload stays until the server confirms it. It is used by one thread at a time.

    Args:
        capacity: Payloads that it holds at most.
        capacity_bytes: Bytes of those events at most.
    """

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self.accepted = 0
        """Number of payloads that were ever put in."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def capacity(self) -> int:
        """Number of payloads that it holds at most."""
        return self._capacity

    @property
    def confirmed(self) -> int:
        """Number of payloads that a server confirmed."""
        return self.accepted - len(self._waiting)

    def put(self, payload: bytes) -> bool:
        """Append a payload; return False if there is no room for it."""
        full = self._bytes + len(payload) > self._capacity_bytes
        if full or len(self._waiting) >= self._capacity:
            return False
        self._waiting.append(payload)
        self._bytes += len(payload)
        self.accepted += 1
        return True

    def batch(self) -> list[bytes]:
        """Return the oldest payloads to send at once; at least one unless the outbox is empty."""
        batch: list[bytes] = []
        size = 0
        for payload in self._waiting:
            size += len(payload)
            if batch and (size > _BYTES_AT_ONCE or len(batch) == _AT_ONCE):
                break
            batch.append(payload)
        return batch

    def drop(self, count: int) -> None:
        """Remove the oldest payloads, which the server confirmed."""
        for _ in range(count):
            self._bytes -= len(self._waiting.popleft())


class Publisher:
    """Publishes from any thread without waiting for the server.

    A sending thread retries while the server is away, full or read-only. :meth:`flush` returns once
    every event is in the log. An exiting process closes its publishers within
    :data:`EXIT_DEADLINE` seconds. A forked process needs its own publisher: the thread and the
    connection stay in the parent.

    Args:
        log: The run's log.
        epoch: The epoch of this process.
        producer: Identity of this publisher, which no other publisher may share.
        capacity: Events that it buffers at most.
        capacity_bytes: Bytes of those events at most.
        deadline: Seconds for which callers wait for a server that is away, such as in
            :meth:`flush`.
        linger: Seconds for which the sending thread keeps it, when idle and without another user.
    """

    def __init__(
        self,
        log: SyncEventLog,
        epoch: int,
        producer: Producer,
        *,
        capacity: int = CAPACITY,
        capacity_bytes: int = CAPACITY_BYTES,
        deadline: float = DEADLINE,
        linger: float = LINGER,
    ) -> None:
        self.log = log
        self.deadline = deadline
        self._linger = linger
        self._stamp = EnvelopeFactory(log.run_id, epoch, producer)
        # An explorer may append to the reports alone: see `core/decisions/report_checks.py`.
        reports = producer.role == REPORTER_ROLE
        self._append = log.append_reports if reports else log.append_many
        self._outbox = Outbox(capacity, capacity_bytes)
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._fault: Exception | None = None
        self._attempts = 0
        self._refused = 0  # number of the last refused attempt
        self._hurried = False
        self._closed = False
        # For the exit of the process, which closes what is open then.
        _open.add(self)

    @cached_property
    def waits(self) -> WaitReporter:
        """Reporter of the long waits of this publisher's process."""
        return WaitReporter(self, run_id=self.run_id, owner=self.producer.incarnation)

    @property
    def run_id(self) -> str:
        """The run of its log."""
        return self._stamp.run_id

    @property
    def epoch(self) -> int:
        """The epoch that its events carry."""
        return self._stamp.epoch

    @property
    def producer(self) -> Producer:
        """The producer that its events name."""
        return self._stamp.producer

    @property
    def backlog(self) -> int:
        """Number of published events that are not known to be in the log."""
        return len(self._outbox)

    def publish(self, event: Event) -> None:
        """Buffer an event for the sending thread; return at once.

        Raises:
            BufferFull: if the buffer is full; the event was not taken, and leaves no gap.
            PublishError: if the server refuses earlier events; this one was not taken either.
            trinity_schemas.ContractError: if the event breaks the contract.
        """
        self._check_process()
        with self._changed:
            if self._closed:
                raise self._refusal(event, CLOSED)
            if self._is_refused:
                raise self._refusal(event, f"the server refuses this user: {self._delay_reason}")
            # Under the lock: the order of the numbers is that of the outbox (2).
            payload = self._stamp.next(event)
            try:
                self._enqueue(event, payload)
            # Also for an interrupt by the user: a number without an event would be a gap (1).
            except BaseException:
                self._stamp.undo()
                raise

    def flush(self, deadline: float | None = None) -> None:
        """Wait until every published event is in the log.

        Raises PublishError after ``deadline`` seconds, by default those of the publisher, or as
        soon as the server refuses an event. The error counts the missing events and gives the
        reason. They stay buffered and are sent again.
        """
        self._check_process()
        deadline = self.deadline if deadline is None else deadline
        with self._changed:
            until, begun = self._outbox.accepted, self._attempts
            self._hurry()
            # The server may accept by now what it refused before: wait for another attempt.
            self._changed.wait_for(
                lambda: self._outbox.confirmed >= until or self._refused > begun or self._is_over,
                deadline,
            )
            missing = until - self._outbox.confirmed
            if missing > 0:
                waited = None if self._is_refused else deadline
                raise EventsMissing(self.run_id, self._delay_reason, waited, count=missing)

    def close(self, deadline: float = CLOSE_DEADLINE) -> None:
        """Flush, and end the sending thread; the log stays open. Raises as :meth:`flush`.

        Later calls of :meth:`publish` fail. Events not taken in time are dropped.
        """
        give_up = time.monotonic() + deadline
        try:
            self.flush(deadline)
        finally:
            with self._changed:
                # After the flush: the thread stops at once, and drops what is left.
                self._closed = True
                thread = self._thread
                self._changed.notify_all()
            if thread is not None:
                thread.join(max(0.0, give_up - time.monotonic()))

    def _enqueue(self, event: Event, payload: bytes) -> None:
        # A log in this process takes the event at once: it needs no thread.
        if not self.log.remote:
            self._append([payload])
            return
        if self._thread is None:  # before the put: an event that cannot be sent is not taken
            self._thread = self._start_sender(event)
        if not self._outbox.put(payload):
            raise BufferFull(
                self.run_id,
                format_unpublished(self.run_id, event),
                self._delay_reason,
                backlog=self.backlog,
            )
        self._changed.notify_all()

    def _start_sender(self, event: Event) -> threading.Thread:
        """Start the thread that sends for as long as the publisher is open and in use.

        An idle thread stays: an exiting process can start no other.
        """
        thread = threading.Thread(
            target=_send_for, args=(ref(self),), name=f"publish-{self.producer.role}", daemon=True
        )
        try:
            if sys.is_finalizing():  # where Python 3.11 would wait for ever
                raise RuntimeError
            thread.start()
        except RuntimeError:
            raise self._refusal(event, EXITING) from None
        return thread

    def _send(self) -> bool:
        """Send batch by batch, each until the server takes it; return False once it is closed."""
        faults = backoff_delays(LONGEST_PAUSE)
        while batch := self._next_batch():
            try:
                self._append(batch)
            except Exception as error:  # no caller would see it in this thread
                self._record_fault(error)
                self._pause(next(faults))
            else:
                faults = backoff_delays(LONGEST_PAUSE)
                with self._changed:
                    self._fault = None
                    self._outbox.drop(len(batch))
                    self._changed.notify_all()
        return self._thread is not None

    def _next_batch(self) -> list[bytes]:
        """Return the next batch; empty after an idle while, and once the publisher is closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._outbox) or self._closed, self._linger)
            batch = [] if self._closed else self._outbox.batch()
            self._attempts += 1
            if self._closed:
                self._thread = None
                self._changed.notify_all()
            return batch

    def _record_fault(self, error: Exception) -> None:
        with self._changed:
            if self._fault is None:
                logger.warning(
                    "events of run %s wait for the server, at most %d of them: %s",
                    self.run_id,
                    self._outbox.capacity,
                    reply_text(error),
                )
            self._fault = error
            if self._is_refused:
                self._refused = self._attempts
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._hurried or self._closed, seconds)
            self._hurried = False

    def _hurry(self) -> None:
        # A flush cuts the pause after a fault short: the server may be back.
        self._hurried = len(self._outbox) > 0
        self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return self._closed and self._thread is None

    @property
    def _is_refused(self) -> bool:
        return self._fault is not None and not is_transient(self._fault)

    @property
    def _delay_reason(self) -> str:
        return SLOW if self._fault is None else reply_text(self._fault) or repr(self._fault)

    def _refusal(self, event: Event, why: str) -> PublishError:
        return PublishError(self.run_id, format_unpublished(self.run_id, event), why)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise PublishError(
                self.run_id,
                f"a publisher of run {self.run_id} belongs to process {self._process}, from which "
                "this one was forked",
                "make a publisher in the process that publishes",
            )


def _send_for(reference: ReferenceType[Publisher]) -> None:
    """Send for a publisher until it is closed, or nothing else refers to it."""
    while (publisher := reference()) is not None and publisher._send():
        # Let go of it between two sends, so that the thread of a publisher without a user ends.
        del publisher


_open: WeakSet[Publisher] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the open publishers at exit; threads that are no daemons have ended by now.

    Finalizers run later, when no thread does: an event that they publish is refused at once.
    """
    give_up = time.monotonic() + EXIT_DEADLINE
    for publisher in list(_open):
        if publisher._process == os.getpid() and not publisher._closed:
            try:
                publisher.close(max(0.0, give_up - time.monotonic()))
            except PublishError as error:
                logger.error("this process ends: %s", error)
