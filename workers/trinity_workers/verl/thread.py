"""Single thread for calls that wait for servers, beside an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OneThread:
    """Executor that runs functions one after the other, in one thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")

    def begin(
        self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs
    ) -> asyncio.Future[T]:
        """Begin a call and return its future. For code in an event loop."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._pool, partial(function, *args, **keywords))

    def wait(self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Run a call in the thread, and block until it returns."""
        return self._pool.submit(function, *args, **keywords).result()

    def end(self) -> None:
        """Wait for pending calls, and end the thread."""
        self._pool.shutdown()
