"""Reports of long waits: the one place where a process waits for others."""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from trinity_schemas import StacksTaken, WaitEnded, WaitStarted
from trinity_schemas.identity import LONGEST_NAME

from ..errors import DeadlineExceeded
from .stacks import collect_stacks

logger = logging.getLogger(__name__)

Outcome = Literal["over", "deadline", "cancelled"]

THRESHOLD = 5.0
"""Seconds after which a wait is reported; also the least seconds between two of its reports."""
RENEWAL = 60.0
"""Seconds between two reports of a wait that lasts and does not change, by default.

The fold forgets a wait that is not renewed, since its process is dead.
"""
MOST_REPORTED = 16
"""Maximum waits of one reporter that are reported at a time."""
_MOST_NAMES = 64
"""Maximum processes that one report names."""
_LONGEST_OBJECT = 500
"""Maximum characters of the object of a wait."""
IDLE_ROUNDS = 6
"""Thresholds for which the thread of a reporter without waits stays, by default."""


class WaitPublisher(Protocol):
    """Publisher of reports, which returns at once; a :class:`~trinity_events.log.Publisher`."""

    def publish(self, event: WaitStarted | WaitEnded | StacksTaken, /) -> None:
        """Buffer the event."""
        ...


class Wait:
    """Wait that is under way, as its reporter yields it."""

    def __init__(
        self,
        reporter: WaitReporter,
        what: str,
        waits_for: tuple[str, ...],
        deadline: float | None,
        step: int | None,
    ) -> None:
        self.step = step
        self.wait_id = ""
        """Name of the wait, given to it by its first report."""
        self.deadline = deadline
        self.began = time.monotonic()
        self.object = what, waits_for
        self.is_outage = False
        """True while it waits for something outside of the run."""
        self.reported_at: float | None = None
        """Time of the last report; None before the first."""
        self.due = math.inf
        self._reporter = reporter

    def update(self, what: str, waits_for: Iterable[str] = (), *, is_outage: bool = False) -> None:
        """Change the object and the processes that are waited for.

        A change is reported too, at most once in the reporter's threshold. Leave out of ``what``
        anything that always changes, such as an age. An outage is of something outside of the run.
        """
        now = what, tuple(waits_for)
        self.is_outage = is_outage
        if now != self.object:
            self.object = now
            self._reporter.changed(self)


class WaitReporter:
    """Reporter of a process's long waits.

    A wait that ends within the threshold publishes nothing. A longer one publishes one
    ``wait-started``, another one when it changes and every ``renewal`` seconds, and one
    ``wait-ended``, also after an error. A report that cannot be published never disturbs the wait.
    The block may wait in a thread or in a task::

        with publisher.waits.waiting(
            "the weights of step 4", ["trainer-0"], deadline=60.0
        ) as wait:
            ...  # block, or await
            wait.update("the weights of step 5", ["trainer-0"])

    Args:
        publisher: Publisher whose role and rank own the waits; None reports nothing.
        threshold: Seconds after which a wait is reported.
        run_id: The run, to take the stacks of the processes that a wait names when it reaches its
            deadline; None takes none.
        owner: Incarnation of the publisher's process, with which the names of its waits begin: no
            report of an explorer can end the wait of another process.
        renewal: Seconds between two reports of a wait that does not change.
        idle_rounds: Thresholds for which its thread stays without waits.
    """

    def __init__(
        self,
        publisher: WaitPublisher | None,
        *,
        threshold: float = THRESHOLD,
        run_id: str | None = None,
        owner: str = "",
        renewal: float = RENEWAL,
        idle_rounds: int = IDLE_ROUNDS,
    ) -> None:
        self._owner = owner
        self._publisher = publisher
        self._run_id = run_id
        self._threshold = threshold
        self._renewal = renewal
        self._idle_rounds = idle_rounds
        # A fork copies the reporter without its thread.
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waits: dict[Wait, None] = {}
        self._thread: threading.Thread | None = None
        self._wakes_at = math.inf
        """Time at which the thread wakes by itself."""

    @contextmanager
    def waiting(
        self,
        what: str,
        waits_for: Iterable[str] = (),
        *,
        deadline: float | None = None,
        step: int | None = None,
    ) -> Iterator[Wait]:
        """Report the block as a wait if it lasts; yield the wait, which the block may update.

        Args:
            what: Object of the wait, in words.
            waits_for: Processes that it waits for, by role and rank, such as ``explorer-3``.
            deadline: Seconds after which the block gives up.
            step: Step whose saves or weights it waits for, so that the chain of waits goes on with
                what that step lacks.
        """
        wait = Wait(self, what, tuple(waits_for), deadline, step)
        # What any other exception than a deadline leaves.
        outcome: Outcome = "cancelled"
        self._begin(wait)
        try:
            yield wait
            outcome = "over"
        except (DeadlineExceeded, TimeoutError):
            outcome = "deadline"
            raise
        finally:
            self._end(wait, outcome)

    def changed(self, wait: Wait) -> None:
        """Report a wait again soon, if it was reported before its object changed."""
        with self._changed:
            if wait.reported_at is not None:
                # Limited, so that an object that changes all the time floods no log.
                self._schedule(wait, min(wait.due, wait.reported_at + self._threshold))

    def _begin(self, wait: Wait) -> None:
        if not self._reports:
            return
        with self._changed:
            self._waits[wait] = None
            # Most waits end before, and cost a dictionary entry and no event.
            self._schedule(wait, wait.began + self._threshold)
            if self._thread is None:
                self._start()

    @property
    def _reports(self) -> bool:
        """Return True where reports are published; a forked process has no thread for them."""
        return self._publisher is not None and self._process == os.getpid()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="waits", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process ends, or has no room for a thread
            logger.debug("waits are not reported: no thread can be started")
        else:
            self._thread = thread

    def _end(self, wait: Wait, outcome: Outcome) -> None:
        if not self._reports:
            return
        if outcome == "deadline" and self._run_id is not None:
            # Before the wait ends, and outside of the lock: it may take seconds.
            for stacks in collect_stacks(self._run_id, wait.object[1]):
                self._publish(stacks)
        with self._changed:
            # Under the lock of the thread: no report can follow the end.
            del self._waits[wait]
            if wait.reported_at is not None:
                seconds = time.monotonic() - wait.began
                self._publish(WaitEnded(wait_id=wait.wait_id, outcome=outcome, seconds=seconds))

    def _schedule(self, wait: Wait, due: float) -> None:
        wait.due = due
        # On the fast path the thread sleeps on: a new wait is due after it wakes.
        if due < self._wakes_at:
            self._changed.notify()

    def _run(self) -> None:
        """Report what is due, until there has been no wait for a while."""
        idle = 0
        with self._changed:
            # The thread stays for a while, since starting one costs more than a short wait.
            while self._waits or idle < self._idle_rounds:
                now = time.monotonic()
                for wait in [wait for wait in self._waits if wait.due <= now]:
                    self._report(wait, now)
                idle = 0 if self._waits else idle + 1
                dues = (wait.due for wait in self._waits)
                self._wakes_at = min(dues, default=now + self._threshold)
                self._changed.wait(max(0.0, self._wakes_at - time.monotonic()))
            self._thread, self._wakes_at = None, math.inf

    def _report(self, wait: Wait, now: float) -> None:
        reported = sum(wait.reported_at is not None for wait in self._waits)
        # Each of the others is tried again after the threshold.
        if wait.reported_at is None and reported >= MOST_REPORTED:
            wait.due = now + self._threshold
            return
        what, waits_for = wait.object
        wait.wait_id = wait.wait_id or f"{self._owner or 'wait'}-{secrets.token_hex(4)}"
        is_accepted = self._publish(
            WaitStarted(
                wait_id=wait.wait_id,
                what=what[:_LONGEST_OBJECT],
                waits_for=tuple(name[:LONGEST_NAME] for name in waits_for[:_MOST_NAMES] if name),
                seconds=now - wait.began,
                deadline=wait.deadline,
                step=wait.step,
                is_outage=wait.is_outage,
            )
        )
        if is_accepted:
            wait.reported_at = now
        # A full buffer of the publisher is tried again soon.
        wait.due = now + (self._renewal if is_accepted else self._threshold)

    def _publish(self, event: WaitStarted | WaitEnded | StacksTaken) -> bool:
        """Publish a report; return False if the publisher did not take it."""
        assert self._publisher is not None
        try:
            self._publisher.publish(event)
        except Exception as error:  # a report must not disturb the wait that it tells of
            logger.debug("a wait was not reported: %s", error)
            return False
        return True


NO_REPORTS = WaitReporter(None)
"""Reporter that reports nothing."""
