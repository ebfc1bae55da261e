"""Calls that are on their way while something else is done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio
import anyio.abc

T = TypeVar("T")


class TaskResult(Generic[T]):
    """A call that began; what it raises ends its task group."""

    def __init__(self, tasks: anyio.abc.TaskGroup, call: Callable[[], Awaitable[T]]) -> None:
        self._done = anyio.Event()
        self._value: list[T] = []
        tasks.start_soon(self._run, call)

    async def _run(self, call: Callable[[], Awaitable[T]]) -> None:
        self._value.append(await call())
        self._done.set()

    async def result(self) -> T:
        """What the call returned, once it has."""
        await self._done.wait()
        return self._value[0]
