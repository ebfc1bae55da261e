"""Check before a save that its disk has room for it.

1. A save that does not fit fails before it writes anything.
2. The bytes of a save are those that its function reports, or those of the last save of its name,
   or those of the same files in the newest checkpoint. Without any of them nothing is checked.
3. Of a save that each rank makes, the parts of all ranks count, less what the step's staged folder
   has already. So a rank is not refused for what its peers have written.
4. A disk whose free space cannot be read refuses nothing: the save itself reports its error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..checkpoints.layout import final_name, parse_final_name
from ..errors import TrinityError
from ..system.disk_space import get_free_disk_bytes
from .saved_paths import SavedPaths

logger = logging.getLogger(__name__)


class DiskTooFull(TrinityError):
    """Raised if a disk has less space than a save is about to need.

    Attributes:
        folder: Folder that the save would write to.
        needed: Bytes that the save needs, as far as known.
        free: Free bytes of the folder's disk.
    """

    folder: Path
    needed: int
    free: int
    text = (
        "{folder} has {free} bytes free, and the save needs about {needed}: nothing was written; "
        "make room, or keep fewer checkpoints"
    )


@dataclass(frozen=True, kw_only=True)
class PlannedSave:
    """Save function, with what is known before it runs.

    Attributes:
        save: Function that does the I/O, and may return a future.
        nbytes: Bytes that it is about to write; None if unknown.
        cancel: Called if the save ends before its function runs.
    """

    save: Callable[[], Any]
    nbytes: int | None = None
    cancel: Callable[[], None] | None = None

    def __call__(self) -> Any:
        """Call the function."""
        return self.save()


class SaveSize(NamedTuple):
    """Bytes of a save that one rank or several ranks make."""

    own: int
    """Bytes of one rank's part; 0 if several ranks write one folder."""
    total: int
    """Bytes of the parts of all ranks."""

    @classmethod
    def of(cls, nbytes: int, ranks: int | None, *, is_folder: bool = False) -> Self:
        """Return the size of a save that was measured by one of its ranks.

        Args:
            nbytes: Measured bytes.
            ranks: Number of ranks that each make it; None if unknown.
            is_folder: True if the bytes are those of a folder that all of them write to.
        """
        if ranks in (None, 1):
            return cls(nbytes, nbytes)
        return cls(0, nbytes) if is_folder else cls(nbytes, nbytes * ranks)


def check_free_space(
    paths: SavedPaths, run: Path | None, size: SaveSize | None, *, ranks: int | None
) -> None:
    """Raise DiskTooFull if a save does not fit.

    Args:
        paths: Paths of the save.
        run: The run's folder.
        size: Size of the save; None takes that of its files in the newest checkpoint.
        ranks: Number of ranks that each make it.
    """
    try:
        staged = paths.staged_root(run)
        if size is None and run is not None and staged is not None:
            size = _measure_newest(paths, run, staged, ranks)
        if size is None:
            return
        needed = size.own
        if size.total > size.own and staged is not None:
            needed = max(needed, size.total - _get_written(staged))
        free = get_free_disk_bytes(paths.path)
    except OSError as error:
        logger.debug("the free space for %s is unknown: %s", paths.path, error)
        return
    if free < needed:
        raise DiskTooFull(paths.path, needed, free)


def _measure_newest(
    paths: SavedPaths, run: Path, staged: Path, ranks: int | None
) -> SaveSize | None:
    """Return the size of the same files in the newest checkpoint; None without a checkpoint."""
    steps = [step for entry in run.iterdir() if (step := parse_final_name(entry.name)) is not None]
    if not steps:
        return None
    newest = paths.moved(staged, run / final_name(max(steps)))
    return SaveSize.of(newest.size(), ranks, is_folder=newest.is_folder)


def _get_written(staged: Path) -> int:
    return SavedPaths(staged).size() if staged.exists() else 0
