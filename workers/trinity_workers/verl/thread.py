"""One thread for everything that waits for servers: an event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OneThread:
    """Runs functions one after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")

    def begin(
        self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs
    ) -> asyncio.Future[T]:
        """Begin it; awaited, it is done. For code of an event loop."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._pool, partial(function, *args, **keywords))

    def wait(self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Run it, and wait for it where one stands."""
        return self._pool.submit(function, *args, **keywords).result()

    def end(self) -> None:
        """Wait for what is under way."""
        self._pool.shutdown()
