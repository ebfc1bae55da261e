"""Heartbeats of a process while it saves, and of a trainer or explorer while it runs.

1. The server has the first heartbeat before an attempt begins, unless it does not answer in time.
2. Heartbeats last until the log has every event of the attempts. If the key went before a
   ``save-finished`` arrived, the leader would take the process for dead.
3. Events that a reachable server has not accepted within a whole lease count as lost.
4. The lease is the shortest one of the attempts that run. One that has ended shortens it no longer.
5. One thread of an incarnation writes and removes the key, so that the end of an old attempt cannot
   undo the heartbeat of a new one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from ..retry import backoff_delays
from .publisher import Publisher

logger = logging.getLogger(__name__)

LEASE = 15.0
"""Seconds without a heartbeat after which the leader takes a process for dead, by default."""
FIRST_HEARTBEAT = 1.0
"""Longest wait for a first heartbeat, in seconds, by default: a server that is away delays no start
and no save for longer."""
BEATS_PER_LEASE = 3
"""Heartbeats within a lease: two may be lost before the leader takes the process for dead."""
_RETURN_REPORTS = 2
"""Reports of one return: the leader may publish the expiry that it saw after the first one."""


class Heartbeat:
    """Thread that sends heartbeats while any attempt waits or runs, several within a lease.

    A heartbeat says that the process lives, not that its saves make progress. A save that hangs
    in its save function keeps its turn, because it looks like a slow write. The step's deadline
    covers that case.

    Args:
        publisher: Publisher of the process, which names its log and incarnation.
        beats_per_lease: Heartbeats within a lease.
    """

    def __init__(self, publisher: Publisher, beats_per_lease: int = BEATS_PER_LEASE) -> None:
        self._log = publisher.log
        self._incarnation = publisher.producer.incarnation
        self._lease = LEASE
        self._leases: list[float] = []
        """Leases of the attempts that run."""
        self._beats_per_lease = beats_per_lease
        self._changed = threading.Condition()
        self._publishers: set[Publisher] = set()
        self._heard = False
        self._renewed_at: float | None = None
        """Time before the last heartbeat that the server took; None before the first."""
        self._returns = 0
        """Number of heartbeats after which the return from a silence is yet to be reported."""
        self._on_return: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, publisher: Publisher) -> Heartbeat:
        """Return the one heartbeat of the publisher's incarnation.

        Two heartbeats of one incarnation would remove each other's key.
        """
        with _hearts_lock:
            heartbeat = _heartbeats.get(publisher.producer.incarnation)
            if heartbeat is None:
                heartbeat = _heartbeats[publisher.producer.incarnation] = cls(publisher)
            return heartbeat

    @contextmanager
    def active(
        self,
        publisher: Publisher,
        lease: float,
        patience: float,
        *,
        on_return: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Send heartbeats during the block, and until the log has what was published in it.

        The block begins once the server has the first heartbeat, or after ``patience`` seconds. The
        leader takes the process for dead after ``lease`` seconds without one. ``on_return`` is
        called in the heartbeat's thread after a silence of a whole lease, and again one heartbeat
        later.
        """
        with self._changed:
            self._leases.append(lease)
            self._lease = min(self._leases)
            self._on_return = on_return or self._on_return
            if self._thread is None:
                # A daemon: an attempt that hangs must not keep a process from ending.
                thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
                thread.start()
                self._thread = thread
            self._publishers.add(publisher)
            self._changed.wait_for(lambda: self._heard, patience)
        try:
            yield
        finally:
            with self._changed:
                self._leases.remove(lease)
                self._lease = min(self._leases, default=self._lease)
                self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait until the thread ends, unless an attempt runs; return True if it has ended."""
        with self._changed:
            self._changed.notify_all()  # the log may just have accepted the last event
            self._changed.wait_for(lambda: self._thread is None or bool(self._leases), seconds)
            return self._thread is None

    def _run(self) -> None:
        faults = backoff_delays(self._lease / self._beats_per_lease)
        idle = 0
        while True:
            pause = self._lease / self._beats_per_lease
            if self._renew():
                faults = backoff_delays(pause)
                idle = 0 if self._leases else idle + 1
            else:
                pause, idle = next(faults), 0
            # Events that a server which answers has not taken for a whole lease count as lost (3).
            if self._is_over_within(pause, idle <= self._beats_per_lease) and self._clear():
                return

    def _renew(self) -> bool:
        # Before the request: the server may take it at once, and a silence must not look shorter.
        sent_at = time.monotonic()
        try:
            self._log.renew_heartbeat(self._incarnation, self._lease)
            heard = True
            # By the answer: the client may have repeated the request through the whole silence.
            silence = 0.0 if self._renewed_at is None else time.monotonic() - self._renewed_at
            if silence >= self._lease:
                self._returns = _RETURN_REPORTS
            self._renewed_at = sent_at
        except Exception as error:  # whatever it is, the next beat may succeed
            level = logging.WARNING if self._heard else logging.DEBUG
            logger.log(level, "a heartbeat of run %s failed: %s", self._log.run_id, error)
            heard = False
        with self._changed:
            self._heard = heard
            self._changed.notify_all()
        # Outside of the lock: the callback is code of a caller.
        if heard and self._returns:
            self._returns -= 1
            if self._on_return is not None:
                self._on_return()
        return heard

    def _is_over_within(self, seconds: float, patient: bool) -> bool:
        """Wait, and return True once no attempt runs and the log has every event.

        Args:
            seconds: Longest wait; False is returned after it.
            patient: False to ignore events that the log does not have yet.
        """
        due = time.monotonic() + seconds
        # A publisher does not say when its backlog is empty: it is looked at, in growing pauses.
        telling = backoff_delays(seconds)
        with self._changed:
            while (remaining := due - time.monotonic()) > 0:
                if self._leases:
                    self._changed.wait(remaining)
                elif patient and any(publisher.backlog for publisher in self._publishers):
                    self._changed.wait(min(remaining, next(telling)))
                else:
                    # An attempt that begins from now on waits for a beat after the key's removal.
                    self._heard = False
                    self._publishers.clear()
                    return True
        return False

    def _clear(self) -> bool:
        """Remove the key; return True if the thread ends, because no attempt has begun since."""
        try:
            self._log.clear_heartbeat(self._incarnation)
        except Exception as error:
            # The key expires by itself, and nothing depends on it any more.
            logger.debug("the heartbeat key of run %s was left: %s", self._log.run_id, error)
        with self._changed:
            # An attempt has begun since: this thread goes on with it, and renews the key at once.
            if self._leases:
                return False
            self._thread = self._on_return = self._renewed_at = None
            self._returns = 0
            self._changed.notify_all()
            return True


# Weak: an incarnation that ends leaves nothing here. A running thread keeps its heartbeat.
_heartbeats: WeakValueDictionary[str, Heartbeat] = WeakValueDictionary()
_hearts_lock = threading.Lock()
