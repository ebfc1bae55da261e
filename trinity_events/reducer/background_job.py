"""Work beside the fold, so that a slow disk delays no grant."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio
import anyio.abc

logger = logging.getLogger(__name__)

T = TypeVar("T")
Task = Callable[[], Awaitable[None]]


class TaskResult(Generic[T]):
    """Result of a call that runs in a task group; an exception of the call ends the group."""

    def __init__(self, tasks: anyio.abc.TaskGroup, call: Callable[[], Awaitable[T]]) -> None:
        self._done = anyio.Event()
        # A list and not an optional value: None may be the result of the call.
        self._value: list[T] = []
        tasks.start_soon(self._run, call)

    async def _run(self, call: Callable[[], Awaitable[T]]) -> None:
        self._value.append(await call())
        self._done.set()

    async def result(self) -> T:
        """Wait for the call and return its result."""
        await self._done.wait()
        return self._value[0]


class BackgroundJob:
    """Coalescing queue: one task runs at a time, and only the newest waiting task is kept.

    The job logs the first exception of a task and no further one until a task succeeds. The next
    submitted task tries again, so that a disk that fails for a while stops no run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._submitted: Task | None = None
        self._busy = False
        self._failing = False
        self._woken = anyio.Event()
        self._rested = anyio.Event()

    @property
    def is_idle(self) -> bool:
        """True if no task runs or waits."""
        return not self._busy and self._submitted is None

    def submit_latest(self, task: Task) -> None:
        """Submit a task; it replaces a task that has not begun."""
        self._submitted = task
        self._woken.set()

    async def until_idle(self) -> None:
        """Wait until no task runs or waits."""
        while not self.is_idle:
            await self._rested.wait()

    async def run(self) -> None:
        """Run submitted tasks until cancelled."""
        while True:
            await self._woken.wait()
            # Replaced before the queue is read: a task that is submitted from here on sets the new
            # event.
            self._woken = anyio.Event()
            while (task := self._submitted) is not None:
                # In one statement: between the two, `is_idle` would be True although a task is
                # about to run.
                self._submitted, self._busy = None, True
                try:
                    await self._attempt(task)
                finally:
                    self._busy = False
            # An anyio event cannot be cleared: waiters get this one, and later calls wait for the
            # next.
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
