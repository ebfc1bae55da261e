"""Which saves of a process are under way: one of a name at a time."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from ..errors import DeadlineExceeded
from .save_attempt import SaveAttempt


class _Save(NamedTuple):
    attempt: SaveAttempt
    thread: threading.Thread
    since: float


class InflightSaves:
    """Lets one save of a name begin when the one before it has ended, and waits for all."""

    def __init__(self) -> None:
        self._saves: dict[str, _Save] = {}
        self._changed = threading.Condition()

    def enter(self, attempt: SaveAttempt, thread: threading.Thread, deadline: float) -> None:
        """Wait until no save of this name is under way, and be the one that is.

        Raises:
            DeadlineExceeded: when the one before it is still under way after so many seconds.
        """
        name, give_up = attempt.slot.name, time.monotonic() + deadline
        with self._changed:
            while name in self._saves:
                self._refuse_itself(self._saves[name], f"save {attempt.what}")
                left = give_up - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"{attempt.what} waited {deadline:g} s for the save of this name before "
                        f"it: {_describe(self._saves[name])}"
                    )
                self._changed.wait(left)
            self._saves[name] = _Save(attempt, thread, time.monotonic())

    def leave(self, attempt: SaveAttempt) -> None:
        """The save has ended, in whichever way."""
        with self._changed:
            del self._saves[attempt.slot.name]
            self._changed.notify_all()

    def wait(self, deadline: float | None) -> None:
        """Wait until none is under way.

        Raises:
            DeadlineExceeded: after ``deadline`` seconds, naming those that still are.
        """
        with self._changed:
            for save in self._saves.values():
                self._refuse_itself(save, "wait for all saves")
            if not self._changed.wait_for(lambda: not self._saves, deadline):
                late = "; ".join(map(_describe, self._saves.values()))
                raise DeadlineExceeded(
                    f"not all saves ended within {deadline:g} s: {late}. "
                    "They go on: wait again, or for longer"
                )

    @staticmethod
    def _refuse_itself(save: _Save, what: str) -> None:
        if save.thread is threading.current_thread():
            raise RuntimeError(
                f"{save.attempt.what} would wait for itself for ever: "
                f"do not {what} from within its save function"
            )


def _describe(save: _Save) -> str:
    doing = "waiting for its turn" if save.attempt.stage == "waiting" else "running"
    return f"{save.attempt.what} is {doing}, begun {time.monotonic() - save.since:.1f} s ago"
