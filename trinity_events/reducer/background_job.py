"""Disk work beside the folding, so that a slow disk holds up nobody who waits for a grant."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio

logger = logging.getLogger(__name__)

Task = Callable[[], Awaitable[None]]


class BackgroundJob:
    """One kind of work: one task at a time, and of those that wait only the newest.

    What a task raises is logged once, until one has succeeded: the next wish tries again, and a
    disk that fails for a while stops no run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._wished: Task | None = None
        self._busy = False
        self._failing = False
        self._woken = anyio.Event()
        self._rested = anyio.Event()

    @property
    def is_idle(self) -> bool:
        """Whether all that was wished for is done."""
        return not self._busy and self._wished is None

    def submit_latest(self, task: Task) -> None:
        """Have the task done soon, in place of one that has not begun."""
        self._wished = task
        self._woken.set()

    async def until_idle(self) -> None:
        """Wait until all that was wished for is done."""
        while not self.is_idle:
            await self._rested.wait()

    async def run(self) -> None:
        """Do what is wished for, until cancelled."""
        while True:
            await self._woken.wait()
            self._woken = anyio.Event()
            while (task := self._wished) is not None:
                self._wished, self._busy = None, True
                try:
                    await self._attempt(task)
                finally:
                    self._busy = False
            self._rested.set()
            self._rested = anyio.Event()

    async def _attempt(self, task: Task) -> None:
        try:
            await task()
            self._failing = False
        except Exception as error:
            if not self._failing:
                self._failing = True
                logger.exception("%s failed (%s) and is tried again", self._name, error)
