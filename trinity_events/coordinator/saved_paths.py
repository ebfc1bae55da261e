"""Paths that one save writes: their bytes, their digest, and their place in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..checkpoints.layout import (
    FILE_DIGESTS,
    MANIFEST_PARTS,
    REDUCER_FILES,
    combine_digests,
    parse_staged_folder,
)
from ..checkpoints.manifest import FileSum, digest_files, sums_below
from ..errors import StructuredError

SavedPath: TypeAlias = Path | str | Sequence[Path | str]
"""Path of a save, or a sequence of files and folders that this save alone writes."""

MOST_PATHS = 256
"""Maximum paths of one save, which its event lists."""


class PathCountRefused(StructuredError, ValueError):
    """A save names no path, or too many.

    Attributes:
        count: Number of its distinct paths.
        most: Maximum paths.
    """

    count: int
    most: int
    text = (
        "a save names 1 to {most} paths, and this one names {count}: give the folder that has them"
    )


class MeasuredPaths(NamedTuple):
    """Size and digests of what a save wrote."""

    bytes: int
    digest: str | None
    """Digest for the event; None for a folder without a list of digests."""
    sums: dict[str, FileSum]
    """Files by their paths in the staged folder; empty for a save outside of staging."""


class SavedPaths:
    """File or folder of a save, or several of them with the folder that they share.

    Args:
        paths: One path, or a sequence of paths, each of which this save alone writes.
        also: Further files and folders that the save writes, which its event does not name.
    """

    def __init__(self, paths: SavedPath, also: Sequence[Path] = ()) -> None:
        self._also = [Path(path).resolve() for path in also]
        if isinstance(paths, (Path, str)):
            self.path, self._files = Path(paths), None
            return
        # Resolved and sorted: the digest must not depend on the order, or on links in the paths.
        full = sorted({Path(path).resolve() for path in paths})
        if not 1 <= len(full) <= MOST_PATHS:
            raise PathCountRefused(len(full), MOST_PATHS)
        self.path, self._files = Path(os.path.commonpath(full)), full

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the sequence, relative to their shared folder; empty for a single path."""
        if self._files is None:
            return ()
        return tuple(str(file.relative_to(self.path)) for file in self._files)

    @property
    def is_folder(self) -> bool:
        """Return True for one folder, into which several ranks may write."""
        return self._files is None and self.path.is_dir()

    def moved(self, root: Path, other: Path) -> SavedPaths:
        """Return the same paths below another folder. Raises ValueError for one outside of root."""
        if self._files is None:
            # Both sides are resolved, since a run's folder is often a link to another disk.
            return SavedPaths(other / self.path.resolve().relative_to(root.resolve()))
        return SavedPaths([other / file.relative_to(root.resolve()) for file in self._files])

    def size(self) -> int:
        """Return the bytes of all files. Raises OSError if a path is absent."""
        return sum(map(_get_size, [self.path] if self._files is None else self._files))

    def measure(self, root: Path | None = None, *, shared: bool = False) -> MeasuredPaths:
        """Return the bytes and the digests. Raises OSError if a path is absent.

        The digest of several paths covers every file below them. That of a single folder is the
        digest of its list of digests; a folder without a list has none.

        Args:
            root: Staged folder whose manifest lists the files; None without one.
            shared: True if several ranks write the folder: some of its files may be unfinished, and
                the reducer digests them once, after all saves have ended.
        """
        sums = {} if root is None else sums_below(self._listed(shared=shared), root.resolve())

        def get_digest(path: Path) -> str:
            # Files of the manifest are digested already: a second read of a checkpoint costs
            # minutes.
            listed = None if root is None else sums.get(_relative_name(path, root))
            return (digest_files([path])[0] if listed is None else listed).sha256

        if self._files is not None:
            digests = {
                str(file.relative_to(self.path)): get_digest(file)
                for path in self._files
                for file in _walk_files(path)
            }
            return MeasuredPaths(self.size(), combine_digests(digests), sums)
        listed = self.path / FILE_DIGESTS if self.path.is_dir() else self.path
        # Invariant of the event: it has no digest for a folder whose writers listed none.
        if listed != self.path and not listed.is_file():
            return MeasuredPaths(self.size(), None, sums)
        return MeasuredPaths(self.size(), f"sha256:{get_digest(listed)}", sums)

    def staged_root(self, run: Path | None) -> Path | None:
        """Return the staged folder of a run that the paths lie in; None outside of staging."""
        relative = None if run is None else self.relative_to(run)
        staged = parse_staged_folder(relative)
        return None if run is None or staged is None else run / staged

    def _listed(self, *, shared: bool) -> list[Path]:
        paths = [self.path.resolve()] if self._files is None else self._files
        is_shared = shared and self.is_folder
        return ([] if is_shared else list(paths)) + self._also

    def relative_to(self, root: Path) -> str | None:
        """Return the path, or the shared folder, below ``root``; None if it lies outside."""
        full, root = self.path.resolve(), root.resolve()
        return str(full.relative_to(root)) if full.is_relative_to(root) else None


def _relative_name(path: Path, root: Path) -> str:
    path, root = path.resolve(), root.resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else ""


def _walk_files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in path.rglob("*"):
        # The reducer and the savers' lists come and go there, so they are no part of a save.
        if file.is_file() and file.name not in REDUCER_FILES and file.parent.name != MANIFEST_PARTS:
            yield file


def _get_size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in _walk_files(path))
    return path.stat().st_size
