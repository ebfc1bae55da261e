"""The folders of a run's checkpoint directory that nobody needs, and how they are taken away."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from ..core import final_name
from ..core.completeness import STAGING
from ..open_folder import OpenFolder
from .checkpoint_files import MARKER, CheckpointFiles

TRASH = ".trash"
"""Where folders are moved before they are removed, so that none is ever seen half removed."""

_OTHERS_STAY = 60.0
"""Seconds for which what another leader moved away is left to it: it may put it back."""

_FINAL = re.compile(r"global_step_(\d+)")
_STAGED = re.compile(r"epoch_(\d+)_step_(\d+)_[0-9a-f]+(?:\.replaced_global_step_(\d+))?")
_MOVED = re.compile(rf"(?:{_FINAL.pattern}|{_STAGED.pattern})\.\d+\.(?P<token>\d+)")
"""What was moved away: its name, when, and the fencing token of the lead."""


class Staged(NamedTuple):
    """A folder below the staging folder, as its maker named it."""

    name: str
    epoch: int
    step: int
    replaced: int | None
    """The step whose place another folder took, when this is what was there."""


class CheckpointTrash:
    """Takes folders of one run away: first by a rename, then for good.

    What the reducer did not make or did not name is never touched, and no link is followed.

    Args:
        files: The run's checkpoint directory.
        token: The fencing token of our lead, by which we know what we moved.
    """

    def __init__(self, files: CheckpointFiles, token: int) -> None:
        self._files = files
        self.folder = files.folder
        self._token = token

    def made(self) -> dict[int, int]:
        """The steps whose folder the reducer made, each with what identifies that folder."""
        found: dict[int, int] = {}
        with self._opened() as run:
            for name in run.names() if run else ():
                match = _FINAL.fullmatch(name)
                if run and match and run.is_folder(name):
                    with run.below(name) as folder:
                        if folder.is_file(MARKER):
                            found[int(match[1])] = os.fstat(folder.descriptor).st_ino
        return found

    def has(self, names: Iterable[str]) -> bool:
        """Whether all these folders are there."""
        return all((self._files.folder / name).is_dir() for name in names)

    def move(self, step: int, identity: int) -> str | None:
        """Move a step's folder away, if it is the one that was meant; returns its name there."""
        name = final_name(step)
        with self._files.lock, self._files.opened() as run:
            if not _is(run, name, identity):
                return None
            moved = self._move(run, name)
            with run.below(TRASH) as trash:
                if _is(trash, moved, identity):
                    return moved
        # We were stopped just before the rename, and another leader made the step anew.
        self.restore(step, moved)
        return None

    def restore(self, step: int, moved: str) -> None:
        """Give a step's folder its name again."""
        name = final_name(step)
        with self._files.lock, self._files.opened() as run, run.below(TRASH) as trash:
            if run.stat(name) is None:
                trash.rename(moved, run, name)

    def staged(self) -> list[Staged]:
        """What lies in the staging folder under a name that the coordinator gives."""
        found: list[Staged] = []
        with self._opened(STAGING) as staging:
            for name in staging.names() if staging else ():
                match = _STAGED.fullmatch(name)
                if staging and match and staging.is_folder(name):
                    replaced = None if match[3] is None else int(match[3])
                    found.append(Staged(name, int(match[1]), int(match[2]), replaced))
        return found

    def move_staged(self, name: str, grace: float) -> None:
        """Move a staged folder away, if nothing in it changed for ``grace`` seconds."""
        with self._files.lock, self._files.opened() as run, run.below(STAGING) as staging:
            if staging.is_folder(name):
                with staging.below(name) as folder:
                    rests = time.time() - _changed_at(folder) > grace
                if rests:
                    self._move(run, name, staging)

    def listed(self) -> list[str]:
        """What is to be removed for good: what we moved away, or a leader before us left there."""
        found: list[str] = []
        with self._opened(TRASH) as trash:
            for name in trash.names() if trash else ():
                match = _MOVED.fullmatch(name)
                if trash and match and trash.is_folder(name):
                    ours = int(match["token"]) == self._token
                    with trash.below(name) as folder:
                        age = time.time() - os.fstat(folder.descriptor).st_ctime
                    if ours or age > _OTHERS_STAY:
                        found.append(name)
        return found

    def remove(self, name: str) -> None:
        """Remove for good what was moved away."""
        with self._files.opened() as run, run.below(TRASH) as trash:
            trash.remove(name)

    def _move(self, run: OpenFolder, name: str, folder: OpenFolder | None = None) -> str:
        moved = f"{name}.{time.time_ns()}.{self._token}"
        with run.below(TRASH, create=True) as trash:
            (folder or run).rename(name, trash, moved)
        return moved

    @contextmanager
    def _opened(self, *names: str) -> Iterator[OpenFolder | None]:
        """Open a folder of the run; None where it is not there."""
        with ExitStack() as exits:
            folder = None
            with suppress(FileNotFoundError):
                run = exits.enter_context(self._files.opened())
                folder = exits.enter_context(run.below(*names))
            yield folder


def _is(folder: OpenFolder, name: str, identity: int) -> bool:
    """Return True if a folder has that name and is the one that is meant."""
    found = folder.stat(name)
    return found is not None and folder.is_folder(name) and found.st_ino == identity


def _changed_at(folder: OpenFolder) -> float:
    """When anything in the folder changed last, or it was renamed, by the file system's clock."""
    newest = os.fstat(folder.descriptor).st_ctime
    for _, below in folder.walk():
        for name in below.names():
            if (found := below.stat(name)) is not None:
                newest = max(newest, found.st_mtime)
    return newest
