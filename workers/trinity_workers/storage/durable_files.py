"""Files and folders that are written durably: complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec


def write_json(path: Path, value: Any) -> None:
    """Write the file durably, complete or not at all."""
    with whole_file(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=2))


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Raise the system's error of a write, with the path, where torch raises another for it.

    torch's writer of zip files answers a full disk with "unexpected pos 704 vs 598"; the system's
    error is its context (``caffe2/serialize/inline_container.cc``).
    """
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from None


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that gets its name, on disk, if the block ends without an error.

    Raises:
        OSError: The file cannot be written; it names the path.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with system_errors(path), temporary.open("wb") as file:
            yield file
            file.flush()
            # Before the rename: else a crash may leave the final name on a file without content.
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # a partial shard would keep a full disk full
        raise
    # The name is data of the folder, which the fsync of the file does not write (fsync(2)).
    sync(path.parent)


def make_folder(folder: Path) -> None:
    """Create the folder and its missing parents, durably."""
    # Looked up before mkdir: each new folder's name has to be synced in its own parent.
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for created_folder in missing:
        sync(created_folder.parent)


def sync_tree(folder: Path) -> None:
    """Make all files in the folder durable, whichever process wrote them."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
