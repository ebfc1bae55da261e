"""Watch over vLLM's core: calls into a core that was killed wait for ever."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import wait
from typing import Any

import anyio

from trinity_events.system.error_text import ungrouped

from ..base import EngineEnded

logger = logging.getLogger(__name__)


class CoreWatch:
    """Watch over the processes of an engine core.

    Args:
        processes: The processes, of multiprocessing.
    """

    def __init__(self, processes: Sequence[Any]) -> None:
        self._processes = processes
        self._names = {process.sentinel: process.name for process in processes}
        self._ended: str | None = None
        self._lock = threading.Lock()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        if self._names:
            threading.Thread(target=self._watch, daemon=True, name="trinity-core-watch").start()

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """End the block as soon as a process has ended.

        Raises:
            EngineEnded: A process ended.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        event = asyncio.Event()
        listener = (asyncio.get_running_loop(), event)
        with self._lock:
            self._listeners.append(listener)
            # Under the lock: an end between the two would reach no listener.
            if self._ended is not None:
                event.set()

        async def watch() -> None:
            await event.wait()
            raise EngineEnded("vLLM", self._ended or "")

        try:
            with ungrouped():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(watch)
                    yield
                    tasks.cancel_scope.cancel()
        except EngineDeadError as error:
            # vLLM may notice the death before the watch does, amid a call that gives up an update.
            raise EngineEnded("vLLM", self._ended or self._processes[0].name) from error
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def give_up(self, reason: str) -> EngineEnded:
        """End the processes, which do not answer; return the error to raise."""
        logger.error("%s: vLLM's processes are ended", reason)
        for process in self._processes:
            process.kill()
        return EngineEnded("vLLM", self._processes[0].name if self._processes else "")

    def _watch(self) -> None:
        # By the processes' sentinels: no wait polls (decision 47).
        ended = wait([*self._names])
        with self._lock:
            self._ended = self._names[ended[0]]
            for loop, event in self._listeners:
                loop.call_soon_threadsafe(event.set)
