"""Notice that a job is about to end: a signal that leaves time to save a checkpoint.

1. A signal is a notice only while the run trains; before and after it ends the command.
2. There is one notice: a further signal ends the command at once.
3. The command ends after the notice, with or without a checkpoint, and its close says which.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

NOTICE_SECONDS = 60.0
"""Seconds that SIGUSR2 leaves, by default; Slurm and others send it as long before the end as the
job asks for."""

NOTICE_SIGNALS = (signal.SIGUSR2,)
"""Signals that are a notice and nothing else. A process that does not train ends on them."""

Save = Callable[[float], Awaitable[str]]
"""Saves a checkpoint within some seconds; returns a sentence about what was saved and lost."""


class Notice:
    """Receiver of the notice of one run.

    Args:
        seconds: Seconds that SIGTERM and SIGUSR2 leave; None has SIGTERM end the command at once.
    """

    def __init__(self, seconds: float | None) -> None:
        self.sentence: str | None = None
        """Sentence about what was saved and lost, once the notice has ended."""
        self._seconds = NOTICE_SECONDS if seconds is None else seconds
        self._numbers = {signal.SIGUSR2, *(() if seconds is None else (signal.SIGTERM,))}
        self._received: anyio.Event | None = None
        self._number: int | None = None

    def receive(self, number: int) -> bool:
        """Return True if a signal is taken as the notice, so that it does not end the command."""
        is_first = self._number is None and self._received is not None
        if not is_first or number not in self._numbers or self._received is None:
            return False
        self._number = number
        self._received.set()
        return True

    @asynccontextmanager
    async def saving(self, save: Save, end: Callable[[], None]) -> AsyncIterator[None]:
        """Save on the notice within the block, and end the command then.

        Args:
            save: Saves a checkpoint.
            end: Ends the command in an orderly way.
        """
        received = self._received = anyio.Event()

        async def handle() -> None:
            await received.wait()
            name = signal.Signals(self._number or 0).name
            self.sentence = f"{name} announced the end: {await save(self._seconds)}"
            end()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(handle)
                yield
                tasks.cancel_scope.cancel()
        finally:
            self._received = None
