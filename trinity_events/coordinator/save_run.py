"""Run of a save function: progress events meanwhile, and the end of the future that it returns."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import StructuredError
from ..log import Publisher
from .save_attempt import SaveAttempt
from .saved_paths import SavedPaths

logger = logging.getLogger(__name__)


class AsyncioFutureReturned(StructuredError, TypeError):
    """A save function returned a future that only its event loop can wait for."""

    text = (
        "a save function returned an asyncio future, which belongs to an event loop: return one of "
        "concurrent.futures, such as that of asyncio.run_coroutine_threadsafe"
    )


@contextmanager
def reporting_progress(
    publisher: Publisher, attempt: SaveAttempt, paths: SavedPaths | None, every: float
) -> Iterator[None]:
    """Publish the number of bytes below the paths while the block runs, whenever it changes.

    The paths are measured every ``every`` seconds. The events are for display only: an error here
    does not fail the save.
    """
    if paths is None:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_publish_sizes,
        args=(publisher, attempt, paths, every, over),
        name="save-progress",
        # A daemon, unlike the save itself: a process that ends needs no more progress.
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        over.set()  # without a join: the thread may wait for a file system that hangs


def _publish_sizes(
    publisher: Publisher,
    attempt: SaveAttempt,
    paths: SavedPaths,
    every: float,
    over: threading.Event,
) -> None:
    last_size = 0
    while not over.wait(every):
        try:
            written = paths.size()
            # An attempt that is over refuses progress: a late event would be out of order.
            if written != last_size and not over.is_set():
                publisher.publish(attempt.progress(written))
                last_size = written
        except Exception as error:
            logger.debug("the progress of %s is unknown: %s", attempt.what, error)


def wait_for_future(returned: Any) -> None:
    """Wait for what a save function returned, if it is a future; raise what it raises.

    torch's ``async_save`` returns a future, or an object with one of staging and one of upload.
    """
    # AsyncSaveResponse of torch.distributed.checkpoint: staging ends earlier, and the files are
    # durable with the upload.
    future = getattr(returned, "upload_completion", returned)
    if isinstance(future, asyncio.Future):
        raise AsyncioFutureReturned
    result = getattr(future, "result", None)
    # Duck typing: futures of different libraries share no base class.
    if callable(result):
        result()
