"""Monitor state of the leader, observable by the tasks that run beside the fold."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from ..core import MonitorState


class LiveState:
    """Observable monitor state, which changes with every batch."""

    def __init__(self, state: MonitorState) -> None:
        self.state = state
        """Current state; readers do not modify it, and read it again after an await."""
        self._moved: anyio.Event | None = None

    def notify(self) -> None:
        """Wake the waiting tasks after entries were folded, or folders got their final name."""
        if self._moved is not None:
            self._moved.set()
            self._moved = None

    async def wait_until(self, met: Callable[[MonitorState], bool]) -> None:
        """Wait until the state meets a condition."""
        while not met(self.state):
            # Made for a waiter only: most batches have none, and the fold then makes no event.
            if self._moved is None:
                self._moved = anyio.Event()
            await self._moved.wait()
