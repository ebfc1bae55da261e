"""Two-phase removal of folders in a run's checkpoint directory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from trinity_schemas import Kind

from ..checkpoints.layout import (
    MADE_FROM,
    SAVED_IN_PLACE,
    STAGING,
    TRASH,
    VERIFIED,
    StagedFolder,
    final_name,
    parse_final_name,
    parse_made_from,
    parse_staged_name,
    parse_trashed_name,
    trashed_name,
)
from ..core import Evidence
from ..system.open_folder import OpenFolder
from .checkpoint_evidence import NotVerified, load_evidence
from .checkpoint_files import CheckpointFiles, read_made_from
from .policy import ReducerTimeouts

logger = logging.getLogger(__name__)


class Origin(NamedTuple):
    """Epoch and step that a folder was saved for."""

    epoch: int | None
    """None if the name of the staged folder has another form."""
    step: int


class CheckpointTrash:
    """Trash of one run: moves folders below :data:`TRASH`, then removes them.

    It never touches folders that the reducer did not make or name, and follows no link.

    Args:
        files: The run's checkpoint directory.
        token: Fencing token of the lead, which identifies the folders that this leader moved.
        timeouts: How long a folder that another leader moved stays.
    """

    def __init__(
        self, files: CheckpointFiles, token: int, timeouts: ReducerTimeouts = ReducerTimeouts()
    ) -> None:
        self._files = files
        self._restore_grace = timeouts.restore_grace
        self._token = token
        self._unproven: dict[int, str] = {}

    def made(self) -> dict[int, int]:
        """Return the steps whose folder the reducer made, or checked in place, with its inode."""
        inodes: dict[int, int] = {}
        with self._opened() as run:
            for name in run.names() if run else ():
                step = parse_final_name(name)
                if run and step is not None and run.is_folder(name):
                    with run.below(name) as folder:
                        if folder.is_file(MADE_FROM) or _was_checked_in_place(folder):
                            inodes[step] = os.fstat(folder.descriptor).st_ino
        return inodes

    @property
    def promoted(self) -> int:
        """Return the number of folders that this process gave their final name."""
        return self._files.promoted

    def evidence(self, kinds: Mapping[int, tuple[Kind, ...]]) -> dict[int, Evidence | None]:
        """Return the evidence of each step's folder; None without any.

        Args:
            kinds: Steps that have a folder, each with the kinds that the log has as complete.
        """
        evidence: dict[int, Evidence | None] = {}
        # Locked, since a folder of version 0.1 gets its mark.
        with self._files.lock, self._opened() as run:
            for step in kinds if run else ():
                assert run is not None
                try:
                    evidence[step] = load_evidence(run, step, kinds[step])
                except NotVerified as error:
                    evidence[step] = None
                    self._log_unproven(step, str(error))
        return evidence

    def _log_unproven(self, step: int, why: str) -> None:
        """Log once why the folder of a step counts for nothing; it is never removed."""
        if self._unproven.get(step) != why:
            logger.warning("%s; it does not count as a checkpoint, and is not removed", why)
            self._unproven[step] = why

    def move(self, step: int, identity: int) -> str | None:
        """Move a step's folder to the trash if it has this inode; return its name there."""
        name = final_name(step)
        with self._files.lock, self._files.opened() as run:
            if not _has_inode(run, name, identity):
                return None
            moved = self._move(run, name)
            with run.below(TRASH) as trash:
                if _has_inode(trash, moved, identity):
                    return moved
        # This process stopped just before the rename, and another leader made the step again.
        self.restore(step, moved)
        return None

    def restore(self, step: int, moved: str) -> None:
        """Move a step's folder out of the trash, unless the step has another folder by now."""
        name = final_name(step)
        with self._files.lock, self._files.opened() as run, run.below(TRASH) as trash:
            if run.stat(name) is None:
                trash.rename(moved, run, name)

    def staged(self) -> list[StagedFolder]:
        """Return the staged folders whose name the coordinator or the reducer gave."""
        folders: list[StagedFolder] = []
        with self._opened(STAGING) as staging:
            for name in staging.names() if staging else ():
                folder = parse_staged_name(name)
                if staging and folder and staging.is_folder(name):
                    folders.append(folder)
        return folders

    def origin_of_staged(self, name: str) -> Origin | None:
        """Return what a staged folder was saved for; None if it never had a final name."""
        with self._opened(STAGING) as staging:
            return _origin(staging, name)

    def move_staged(self, name: str, grace: float) -> None:
        """Move a staged folder to the trash if nothing in it changed for ``grace`` seconds."""
        with self._files.lock, self._files.opened() as run, run.below(STAGING) as staging:
            if staging.is_folder(name):
                with staging.below(name) as folder:
                    is_unchanged = time.time() - _last_change(folder) > grace
                if is_unchanged:
                    self._move(run, name, staging)

    def listed(self) -> list[str]:
        """Return the folders to remove: those of this leader, and old ones of other leaders."""
        names: list[str] = []
        with self._opened(TRASH) as trash:
            for name in trash.names() if trash else ():
                fence = parse_trashed_name(name)
                if trash and fence is not None and trash.is_folder(name):
                    ours = fence == self._token
                    with trash.below(name) as folder:
                        # By ctime, which the rename into the trash set; it leaves the mtime of the
                        # folder.
                        age = time.time() - os.fstat(folder.descriptor).st_ctime
                    # Another leader may be between its rename and its second mark, and restore the
                    # folder.
                    if ours or age > self._restore_grace:
                        names.append(name)
        return names

    def remove(self, name: str) -> None:
        """Remove a folder from the trash and from the disk."""
        with self._files.opened() as run, run.below(TRASH) as trash:
            trash.remove(name)

    def _move(self, run: OpenFolder, name: str, folder: OpenFolder | None = None) -> str:
        # Nanoseconds, as one step may be saved and removed more than once in a lead.
        moved = trashed_name(name, time.time_ns(), self._token)
        with run.below(TRASH, create=True) as trash:
            (folder or run).rename(name, trash, moved)
        return moved

    @contextmanager
    def _opened(self, *names: str) -> Iterator[OpenFolder | None]:
        """Open a folder of the run; yield None if it is absent."""
        with ExitStack() as exits:
            folder = None
            with suppress(FileNotFoundError):
                run = exits.enter_context(self._files.opened())
                folder = exits.enter_context(run.below(*names))
            yield folder


def _was_checked_in_place(folder: OpenFolder) -> bool:
    """Return True for a folder without staging that its savers marked, and the reducer checked."""
    return folder.is_file(SAVED_IN_PLACE) and folder.is_file(VERIFIED)


def _has_inode(folder: OpenFolder, name: str, identity: int) -> bool:
    """Return True if the name is that of a folder with this inode."""
    status = folder.stat(name)
    return status is not None and folder.is_folder(name) and status.st_ino == identity


def _last_change(folder: OpenFolder) -> float:
    """Return the time of the folder's last change or rename, by the file system's clock."""
    # By ctime: a rename changes no mtime, and a folder that just came here counts as changed.
    newest = os.fstat(folder.descriptor).st_ctime
    for _, below in folder.walk():
        for name in below.names():
            if (status := below.stat(name)) is not None:
                newest = max(newest, status.st_mtime)
    return newest


def _origin(folder: OpenFolder | None, name: str) -> Origin | None:
    mark = None if folder is None else read_made_from(folder, name)
    if mark is None:
        return None
    staged = parse_made_from(mark)
    return Origin(staged.epoch, staged.step) if staged else Origin(None, 0)
