"""Waits of tests: for a condition, and for a process that ends with its block."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio

PATIENCE = 120.0
"""Seconds after which what a test waits for will not come, on a loaded machine too."""


async def until(met: Callable[[], Any], deadline: float = PATIENCE) -> Any:
    """Wait until a condition holds; it may be a coroutine function."""
    with anyio.fail_after(deadline):
        while True:
            result = met()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return result
            await anyio.sleep(0.01)


def wait_until(
    met: Callable[[], Any], otherwise: str = "waited in vain", *, patience: float = PATIENCE
) -> Any:
    """Wait, without an event loop, until a condition holds."""
    give_up = time.monotonic() + patience
    while not (result := met()):
        assert time.monotonic() < give_up, otherwise
        time.sleep(0.01)
    return result


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a process that is killed, should it still run, and reaped when the block is left."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
