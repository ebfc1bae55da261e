"""How far a save has come, told now and then while it runs."""

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
"""Seconds from one report to the next."""


@contextmanager
def telling(publisher: Publisher, attempt: SaveAttempt, path: Path | None) -> Iterator[None]:
    """While the block runs, tell how many bytes are in the path, where they have become others.

    It is for people who wait: whatever fails of it, the save goes on.
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
        over.set()  # and it is not waited for: it may be looking at a file system that hangs


def _tell(publisher: Publisher, attempt: SaveAttempt, path: Path, over: threading.Event) -> None:
    told = 0
    while not over.wait(EVERY):
        try:
            written = size_of(path)
            if written != told and not over.is_set():
                publisher.publish(attempt.progress(written))
                told = written
        except Exception as error:
            logger.debug("how far %s has come is not known: %s", attempt.what, error)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder. Raises OSError when it is not there."""
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    return path.stat().st_size
