"""Futures that save functions return: a save ends when its future does."""

from __future__ import annotations

import asyncio
from typing import Any


def wait_for_future(returned: Any) -> None:
    """Wait for what a save function returned, if it is a future; raise what it raises.

    torch's ``async_save`` returns a future, or an object with one of staging and one of upload.
    """
    future = getattr(returned, "upload_completion", returned)
    if isinstance(future, asyncio.Future):
        raise TypeError(
            "a save function returned an asyncio future, which belongs to an event loop: return "
            "one of concurrent.futures, such as that of asyncio.run_coroutine_threadsafe"
        )
    result = getattr(future, "result", None)
    if callable(result):
        result()
