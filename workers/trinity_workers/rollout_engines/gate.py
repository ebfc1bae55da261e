"""Gate between the tokens of a generation, where it stands still while the engine is paused.

1. :meth:`Gate.pause` and :meth:`Gate.hold` return once nothing moves: a block that moves stands
   still at its next :meth:`Gate.stop_over`, or ends.
2. A pause ends by :meth:`Gate.resume` or by its lease. Neither of them ends a hold.
3. A hold with ``end`` is counted before it waits, so that each block that began before it ends.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trinity_events.diagnostics.waits import NO_REPORTS, WaitReporter


class Gate:
    """Lets one generation pass from token to token, unless it is paused or held.

    A pause ends by itself after its lease. A hold belongs to a block of code in this process, and
    ends with it.

    Args:
        waits: Reporter of long pauses; by default none reports them.
    """

    def __init__(self, waits: WaitReporter = NO_REPORTS) -> None:
        self._waits = waits
        self._changed = threading.Condition()
        self._paused_until = -math.inf
        self._holds = 0
        self._moving = 0
        self.ends = 0
        """Holds that ended what was moving; a block that began before the last one is to end."""

    def pause(self, lease: float) -> None:
        """Close the gate for at most `lease` seconds, and wait until generation stands still."""
        with self._changed:
            self._paused_until = time.monotonic() + lease
            self._changed.wait_for(self._is_still)

    def resume(self) -> None:
        """End a pause."""
        with self._changed:
            self._paused_until = -math.inf
            self._changed.notify_all()

    @contextmanager
    def hold(self, *, end: bool = False) -> Iterator[None]:
        """Keep generation still for the block; with ``end``, what was moving is to end first."""
        with self._changed:
            # With the closing, so that nothing can begin in between.
            self.ends += end
            self._holds += 1
            self._changed.wait_for(self._is_still)
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    @contextmanager
    def moving(self) -> Iterator[int]:
        """Wait until the gate is open, then count as moving for the block; yield :attr:`ends`."""
        with self._changed:
            self._enter()
            ends = self.ends
        try:
            yield ends
        finally:
            with self._changed:
                self._leave()

    def stop_over(self) -> None:
        """Stand still while the gate is closed; for the block that is moving."""
        with self._changed:
            if self._is_closed():
                # Left first: what closed the gate waits until nothing moves.
                self._leave()
                self._enter()

    def _enter(self) -> None:
        if self._is_closed():
            what = "the end of an installation" if self._holds else "its paused engine"
            with self._waits.waiting(what):
                while self._is_closed():
                    # Computed again each time: a further pause may have moved the end.
                    remaining = self._paused_until - time.monotonic()
                    # The end of a hold notifies; that of a lease is a moment on the clock.
                    self._changed.wait(None if self._holds else max(remaining, 0.0))
        self._moving += 1

    def _leave(self) -> None:
        self._moving -= 1
        self._changed.notify_all()

    def _is_closed(self) -> bool:
        return self._holds > 0 or time.monotonic() < self._paused_until

    def _is_still(self) -> bool:
        return self._moving == 0
