"""An event loop on virtual time: nobody ever waits, the clock jumps to whatever comes next."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from trinity_events.log.retry import JITTER

T = TypeVar("T")

BEGINNING = 1_700_000_000.0
"""Unix time at which every simulation begins."""


class Stuck(Exception):
    """Everybody waits for somebody else, and no time will change that."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is ready in the order in which it became so; then it is the next timer's time."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = self

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """What a selector would wait for: here, time passes."""
        if timeout is None:
            raise Stuck("everybody waits for somebody else")
        self._now += timeout
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class _Clock:
    """Stands in for the ``time`` module in the code under simulation."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.monotonic = loop.time
        self.perf_counter = loop.time
        self._loop = loop

    def time(self) -> float:
        return BEGINNING + self._loop.time()

    def sleep(self, seconds: float) -> None:
        raise AssertionError("code on the event loop slept, and would have held up everybody")


def run(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """Run to the end on virtual time; chance, too, is the seed's."""
    loop = VirtualLoop()
    state = JITTER.getstate()
    JITTER.seed(seed)
    try:
        with _time_of(loop), _quiet():
            return loop.run_until_complete(main())
    finally:
        JITTER.setstate(state)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@contextmanager
def _time_of(loop: VirtualLoop) -> Iterator[None]:
    """Every module of the package that looks at the clock sees the loop's."""
    clock = _Clock(loop)
    patched = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("trinity_events.") and vars(module).get("time") is time
    ]
    for module in patched:
        module.time = clock
    try:
        yield
    finally:
        for module in patched:
            module.time = time


@contextmanager
def _quiet() -> Iterator[None]:
    """Faults are what a simulation is made of: they are not worth a line each."""
    logger = logging.getLogger("trinity_events")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
