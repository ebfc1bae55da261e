"""Check before a save that its disk has room for it.

1. A save that does not fit fails before it writes anything.
2. The bytes of a save are those that its function reports, or those of the last save of its name,
   or those of the same files in the newest checkpoint. Without any of them nothing is checked.
3. Of a save that each rank makes, the parts of all ranks count, less what the step's staged folder
   has already. So a rank is not refused for what its peers have written.
4. Staged saves of a process that are under way together are added up, less what they have written.
   Those of other processes are not known here, but for the parts of invariant 3.
5. A disk whose free space cannot be read refuses nothing: the save itself reports its error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from trinity_schemas import Kind

from ..checkpoints.layout import final_name, parse_final_name
from ..errors import TrinityError
from ..system.disk_space import get_free_disk_bytes
from .save_attempt import SaveAttempt
from .saved_paths import SavedPaths

logger = logging.getLogger(__name__)


class DiskTooFull(TrinityError):
    """Raised if a disk has less space than a save is about to need.

    Attributes:
        folder: Folder that the save would write to.
        needed: Bytes that the save needs, as far as known.
        free: Free bytes of the folder's disk.
        others: Bytes that saves under way are to write yet.
    """

    folder: Path
    needed: int
    free: int
    others: int = 0
    text = (
        "{folder} has {free} bytes free, and the save needs about {needed}{_others}: nothing was "
        "written; make room, or keep fewer checkpoints"
    )

    @property
    def _others(self) -> str:
        return f", in addition to {self.others} of saves under way" if self.others else ""


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
        # Ranks of one folder each measure all of it, so the share of one of them is unknown.
        return cls(0, nbytes) if is_folder else cls(nbytes, nbytes * ranks)


class SaveSpace:
    """Space that the saves of one process need.

    Args:
        run: The run's folder; without one, saves under way are not added up.
    """

    def __init__(self, run: Path | None) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._last: dict[tuple[Kind, str], SaveSize] = {}
        """Size of the last finished save of each kind and name."""
        self._staged: dict[Path, dict[str, SaveSize]] = {}
        """Sizes of the saves of each staged folder by their ids, without those that failed."""
        self._under_way: set[str] = set()

    def reserve(
        self, attempt: SaveAttempt, paths: SavedPaths, planned_bytes: int | None = None
    ) -> None:
        """Reserve space for a save until :meth:`finish` or :meth:`release`.

        Args:
            attempt: The save.
            paths: Its paths.
            planned_bytes: Bytes that its function is about to write, if it knows them.

        Raises:
            DiskTooFull: if the save does not fit.
        """
        slot, ranks = attempt.slot, attempt.ranks
        size = None if planned_bytes is None else SaveSize.of(planned_bytes, ranks)
        with self._lock:
            try:
                staged = paths.staged_root(self._run)
                size = size or self._last.get((slot.kind, slot.name))
                # A first save of a resumed process has no last size; the newest checkpoint of the
                # run has one.
                if size is None and self._run is not None and staged is not None:
                    size = _measure_newest(paths, self._run, staged, ranks)
                # Invariant 2: a guess could refuse a save that fits.
                if size is None:
                    return
                needed, others = self._sum_needed(size, staged)
                # Read under the lock: two saves that start together must not both count the same
                # free bytes.
                free = get_free_disk_bytes(paths.path)
            except OSError as error:
                logger.debug("the free space for %s is unknown: %s", paths.path, error)
                return
            if free < needed + others:
                raise DiskTooFull(paths.path, needed, free, others)
            if staged is not None:
                self._staged.setdefault(staged, {})[attempt.save_id] = size
                self._under_way.add(attempt.save_id)

    def _sum_needed(self, size: SaveSize, staged: Path | None) -> tuple[int, int]:
        """Return the bytes that a save is to write yet, and those of the saves under way."""
        if staged is None:
            return size.own, 0
        # Folders without a save under way are forgotten: a run stages one for each checkpoint.
        self._staged = {
            root: sizes
            for root, sizes in self._staged.items()
            if root == staged or sizes.keys() & self._under_way
        }
        rests = {root: self._sum_rest(root) for root in self._staged if root != staged}
        rest = self._sum_rest(staged) + size.total
        # The folder may have files of saves whose sizes are unknown.
        needed = max(size.own, min(size.total, rest))
        # A rest below zero, of files with unknown sizes, frees nothing for other saves.
        return needed, max(0, rest - needed) + sum(max(0, each) for each in rests.values())

    def _sum_rest(self, staged: Path) -> int:
        """Return the bytes that the saves of a staged folder are to write yet."""
        sizes = self._staged.get(staged, {})
        return sum(size.total for size in sizes.values()) - _get_written(staged)

    def finish(self, attempt: SaveAttempt, nbytes: int, *, is_folder: bool) -> None:
        """Record the measured size of a save that has ended.

        Args:
            attempt: The save.
            nbytes: Bytes that it wrote.
            is_folder: True if the bytes are those of a folder that all its ranks write to.
        """
        size = SaveSize.of(nbytes, attempt.ranks, is_folder=is_folder)
        with self._lock:
            self._last[attempt.slot.kind, attempt.slot.name] = size
            self._under_way.discard(attempt.save_id)
            for sizes in self._staged.values():
                # The measured size takes the place of the planned one, from which the rest is
                # computed.
                if attempt.save_id in sizes:
                    sizes[attempt.save_id] = size

    def release(self, attempt: SaveAttempt) -> None:
        """Release the space of a save that failed."""
        with self._lock:
            self._under_way.discard(attempt.save_id)
            for sizes in self._staged.values():
                # Files of a failed save stay on the disk, and so are missing in its free space
                # already.
                sizes.pop(attempt.save_id, None)


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
    # The first save of a step runs before its folder is made.
    return SavedPaths(staged).size() if staged.exists() else 0
