"""Running saves of a process: one at a time for each name."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from ..diagnostics.waits import Wait, WaitReporter
from ..errors import DeadlineExceeded, StructuredError
from .save_attempt import SaveAttempt


class SaveWaitsForItself(StructuredError, RuntimeError):
    """A save function asks for something that waits for its own save.

    Attributes:
        save: The save, such as ``model of step 5``.
        action: What it asks for.
    """

    save: str
    action: str
    text = "{save} would wait for itself for ever: do not {action} from within its save function"


class _Save(NamedTuple):
    attempt: SaveAttempt
    thread: threading.Thread
    since: float


class InflightSaves:
    """Registry of running saves, which serialises the saves of one name.

    Args:
        waits: Reporter of long waits for saves.
    """

    def __init__(self, waits: WaitReporter) -> None:
        self._waits = waits
        self._saves: dict[str, _Save] = {}
        self._changed = threading.Condition()  # also the lock of the registry

    def enter(self, attempt: SaveAttempt, thread: threading.Thread, deadline: float) -> None:
        """Wait until no save of this name runs, then register the attempt.

        Raises:
            DeadlineExceeded: if the earlier save still runs after ``deadline`` seconds.
        """
        name = attempt.slot.name
        with self._changed:
            if name in self._saves:
                earlier = self._saves[name]
                step = earlier.attempt.slot.step
                with self._waits.waiting(*_object(earlier), deadline=deadline, step=step) as wait:
                    self._wait_for_earlier(attempt, deadline, wait)
            self._saves[name] = _Save(attempt, thread, time.monotonic())

    def _wait_for_earlier(self, attempt: SaveAttempt, deadline: float, reported: Wait) -> None:
        name, give_up = attempt.slot.name, time.monotonic() + deadline
        # A loop: another waiter of this name may have registered its save first.
        while name in self._saves:
            earlier = self._saves[name]
            # Checked in each round, since the save that runs may be another one by now.
            self._refuse_itself(earlier, f"save {attempt.what}")
            remaining = give_up - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceeded(
                    f"the save of this name before {attempt.what} did not end",
                    deadline,
                    _format_save(earlier),
                )
            # The report names the save that is waited for now, not the first one.
            reported.update(*_object(earlier))
            self._changed.wait(remaining)

    def leave(self, attempt: SaveAttempt) -> None:
        """Unregister an attempt that succeeded or failed."""
        with self._changed:
            del self._saves[attempt.slot.name]
            # All waiters: some wait for this name, others for all names.
            self._changed.notify_all()

    def wait(self, deadline: float | None, name: str | None = None) -> None:
        """Wait until no save runs, or none of the name.

        Raises:
            DeadlineExceeded: after ``deadline`` seconds; the message names the running saves.
        """
        with self._changed:
            # A save function that waits for all saves would wait for itself until its deadline.
            for save in self._running(name):
                self._refuse_itself(save, "wait for all saves")
            if not self._wait_for(deadline, name):
                late = "; ".join(map(_format_save, self._running(name)))
                raise DeadlineExceeded(
                    "not all saves ended",
                    deadline or 0.0,
                    f"{late}. They continue: wait again, or for longer",
                )

    def _running(self, name: str | None) -> list[_Save]:
        return [save for key, save in self._saves.items() if name in (None, key)]

    def _wait_for(self, deadline: float | None, name: str | None) -> bool:
        """Return True once no save of the name runs, or False after the deadline."""
        running = self._running(name)
        if not running:
            return True
        step = running[0].attempt.slot.step
        with self._waits.waiting(*_object(*running), deadline=deadline, step=step):
            return self._changed.wait_for(lambda: not self._running(name), deadline)

    @staticmethod
    def _refuse_itself(save: _Save, action: str) -> None:
        if save.thread is threading.current_thread():
            raise SaveWaitsForItself(save.attempt.what, action)


def _object(*saves: _Save) -> tuple[str, list[str]]:
    """Return the object of a wait for saves, and the processes that run them."""
    slots = [save.attempt.slot for save in saves]
    what = f"the end of {', '.join(save.attempt.what for save in saves)}"
    return what, list(dict.fromkeys(f"{slot.role}-{slot.rank}" for slot in slots))


def _format_save(save: _Save) -> str:
    doing = "waiting for its turn" if save.attempt.stage == "waiting" else "running"
    return f"{save.attempt.what} is {doing}, begun {time.monotonic() - save.since:.1f} s ago"
