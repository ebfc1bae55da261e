"""Paths that one save writes: their bytes, their digest, and their place in the run's folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ..checkpoint_layout import FILE_DIGESTS, REDUCER_FILES, digest_of_files

SavedPath: TypeAlias = Path | str | Sequence[Path | str]
"""Path of a save, or a sequence of files and folders that this save alone writes."""

MOST_PATHS = 256
"""Maximum paths of one save, which its event lists."""


class SavedPaths:
    """File or folder of a save, or several of them with the folder that they share.

    Args:
        paths: One path, or a sequence of paths, each of which this save alone writes.
    """

    def __init__(self, paths: SavedPath) -> None:
        if isinstance(paths, (Path, str)):
            self.path, self._files = Path(paths), None
            return
        full = sorted({Path(one).resolve() for one in paths})
        if not 1 <= len(full) <= MOST_PATHS:
            raise ValueError(
                f"a save names 1 to {MOST_PATHS} paths, and this one names {len(full)}: give the "
                "folder that has them"
            )
        self.path, self._files = Path(os.path.commonpath(full)), full

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the sequence, relative to their shared folder; empty for a single path."""
        if self._files is None:
            return ()
        return tuple(str(one.relative_to(self.path)) for one in self._files)

    def size(self) -> int:
        """Return the bytes of all files. Raises OSError if a path is absent."""
        return sum(map(_size_of, [self.path] if self._files is None else self._files))

    def measure(self) -> tuple[int, str | None]:
        """Return the bytes and the digest. Raises OSError if a path is absent.

        The digest of several paths covers every file below them. That of a single folder is the
        digest of its list of digests; a folder without a list has none.
        """
        if self._files is not None:
            digests = {
                str(file.relative_to(self.path)): _digest_of(file)
                for one in self._files
                for file in _files_of(one)
            }
            return self.size(), digest_of_files(digests)
        listed = self.path / FILE_DIGESTS if self.path.is_dir() else self.path
        if listed != self.path and not listed.is_file():
            return self.size(), None
        return self.size(), f"sha256:{_digest_of(listed)}"

    def relative_to(self, root: Path) -> str | None:
        """Return the path, or the shared folder, below ``root``; None if it lies outside."""
        full, root = self.path.resolve(), root.resolve()
        return str(full.relative_to(root)) if full.is_relative_to(root) else None


def _files_of(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for one in path.rglob("*"):
        if one.is_file() and one.name not in REDUCER_FILES:
            yield one


def _size_of(path: Path) -> int:
    if path.is_dir():
        return sum(one.stat().st_size for one in _files_of(path))
    return path.stat().st_size


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
