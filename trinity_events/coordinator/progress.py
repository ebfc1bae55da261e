"""Progress events of a running save."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..log import Publisher
from .save_attempt import SaveAttempt

logger = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds between two progress events of one save."""


@contextmanager
def reporting_progress(
    publisher: Publisher, attempt: SaveAttempt, path: Path | None
) -> Iterator[None]:
    """Publish the number of bytes below the path while the block runs, whenever it changes.

    The events are for display only: an error here does not fail the save.
    """
    if path is None:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_tell, args=(publisher, attempt, path, over), name="save-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()  # without a join: the thread may wait for a file system that hangs


def _tell(publisher: Publisher, attempt: SaveAttempt, path: Path, over: threading.Event) -> None:
    told = 0
    while not over.wait(EVERY):
        try:
            written = size_of(path)
            if written != told and not over.is_set():
                publisher.publish(attempt.progress(written))
                told = written
        except Exception as error:
            logger.debug("the progress of %s is unknown: %s", attempt.what, error)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder. Raises OSError if absent."""
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    return path.stat().st_size
