"""The state as the leader folds it, for those who work beside the folding."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from ..core import MonitorState


class LiveState:
    """A state that moves on, and a way to wait for it."""

    def __init__(self, state: MonitorState) -> None:
        self.state = state
        """Only to be looked at, and not across an await."""
        self._moved: anyio.Event | None = None

    def notify(self) -> None:
        """Wake those who wait, after entries were folded."""
        if self._moved is not None:
            self._moved.set()
            self._moved = None

    async def wait_until(self, met: Callable[[MonitorState], bool]) -> None:
        """Wait until the state is as asked."""
        while not met(self.state):
            if self._moved is None:
                self._moved = anyio.Event()
            await self._moved.wait()
