"""Tells the server that a process which saves is alive, for as long as it saves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from ..log import Publisher
from ..log.retry import backoff_delays

logger = logging.getLogger(__name__)

FIRST_BEAT = 1.0
"""Seconds that a save waits at most for its first beat to be heard before it goes on."""
_BEATS_PER_LEASE = 3


class Heartbeat:
    """One thread that beats every third of the lease while any attempt waits or runs.

    It says that the process lives, not that its saves go on: one that is stuck in its save
    function keeps its turn, on purpose, since nobody can tell it from one that writes slowly.
    The step's deadline is for that.

    The thread also beats until all that its attempts said is in the log: a rest that overtook a
    ``save-finished`` would look like a death. But what a server that hears us has not taken for
    a whole lease, it will not take. Then the thread takes the key away and ends. Beats and rests
    are of this one thread, so that none of an old attempt can undo one of a new attempt.
    """

    def __init__(self, publisher: Publisher, lease: float) -> None:
        self._log = publisher.log
        self._incarnation = publisher.producer.incarnation
        self._lease = lease
        self._changed = threading.Condition()
        self._attempts = 0
        self._publishers: set[Publisher] = set()
        self._heard = False
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, publisher: Publisher, lease: float) -> Heartbeat:
        """The heart of the publisher's incarnation, of which there is one; the least lease holds.

        Two would take each other's key away.
        """
        with _hearts_lock:
            found = _hearts.get(publisher.producer.incarnation)
            if found is None:
                found = _hearts[publisher.producer.incarnation] = cls(publisher, lease)
            found._lease = min(found._lease, lease)
            return found

    @contextmanager
    def beating(self, publisher: Publisher, patience: float | None = None) -> Iterator[None]:
        """Beat for the block, and until what the publisher was told in it is in the log.

        The first beat is heard before the block begins, or ``patience`` seconds have passed, by
        default :data:`FIRST_BEAT`: a server that is down holds no save up for longer.
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
                thread.start()
                self._thread = thread
            self._attempts += 1
            self._publishers.add(publisher)
            self._changed.wait_for(
                lambda: self._heard, FIRST_BEAT if patience is None else patience
            )
        try:
            yield
        finally:
            with self._changed:
                self._attempts -= 1
                self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait until it rests, unless an attempt is under way; whether it does."""
        with self._changed:
            self._changed.notify_all()  # what was left to tell may just have been told
            self._changed.wait_for(lambda: self._thread is None or self._attempts > 0, seconds)
            return self._thread is None

    def _run(self) -> None:
        faults = backoff_delays(self._lease / _BEATS_PER_LEASE)
        idle = 0
        while True:
            pause = self._lease / _BEATS_PER_LEASE
            if self._beat():
                faults = backoff_delays(pause)
                idle = 0 if self._attempts else idle + 1
            else:
                pause, idle = next(faults), 0
            if self._is_over_within(pause, idle <= _BEATS_PER_LEASE) and self._rest():
                return

    def _beat(self) -> bool:
        try:
            self._log.beat(self._incarnation, self._lease)
            heard = True
        except Exception as error:  # whatever it is, the next beat may be heard
            level = logging.WARNING if self._heard else logging.DEBUG
            logger.log(level, "a heartbeat of run %s was not heard: %s", self._log.run_id, error)
            heard = False
        with self._changed:
            self._heard = heard
            self._changed.notify_all()
        return heard

    def _is_over_within(self, seconds: float, patient: bool) -> bool:
        """Wait; whether there came to be no attempt, and nothing left to tell, within the time.

        Without patience it does not matter what is left to tell.
        """
        due = time.monotonic() + seconds
        telling = backoff_delays(seconds)
        with self._changed:
            while (left := due - time.monotonic()) > 0:
                if self._attempts:
                    self._changed.wait(left)
                elif patient and any(one.backlog for one in self._publishers):
                    self._changed.wait(min(left, next(telling)))
                else:
                    # Whoever comes from now on waits for a beat that follows the rest.
                    self._heard = False
                    self._publishers.clear()
                    return True
        return False

    def _rest(self) -> bool:
        """Take the key away; whether the thread is to end, because nobody has come meanwhile."""
        try:
            self._log.rest(self._incarnation)
        except Exception as error:
            # It lapses by itself, and nothing depends on it any more.
            logger.debug("the heartbeat key of run %s was left: %s", self._log.run_id, error)
        with self._changed:
            if self._attempts:
                return False
            self._thread = None
            self._changed.notify_all()
            return True


_hearts: WeakValueDictionary[str, Heartbeat] = WeakValueDictionary()
_hearts_lock = threading.Lock()
