"""The folders of a run's checkpoint directory that nobody needs, and how they are taken away."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..core import final_name
from ..core.complete import STAGING
from .checkpoints import MARKER, CheckpointFiles

TRASH = ".trash"
"""Where folders are moved before they are removed, so that none is ever seen half removed."""

_OTHERS_STAY = 60.0
"""Seconds for which what another leader moved away is left to it: it may put it back."""

_FINAL = re.compile(r"global_step_(\d+)")
_STAGED = re.compile(r"epoch_(\d+)_step_(\d+)_[0-9a-f]+(?:\.replaced_global_step_(\d+))?")


class Staged(NamedTuple):
    """A folder below the staging folder, as its maker named it."""

    name: str
    epoch: int
    step: int
    replaced: int | None
    """The step whose place another folder took, when this is what was there."""


class Trash:
    """Takes folders of one run away: first by a rename, then for good.

    What the reducer did not make or did not name is never touched.

    Args:
        files: The run's checkpoint directory.
        token: The fencing token of our lead, by which we know what we moved.
    """

    def __init__(self, files: CheckpointFiles, token: int) -> None:
        self._files = files
        self._folder = self.folder = files.folder
        self._token = token

    def made(self) -> dict[int, int]:
        """The steps whose folder the reducer made, each with what identifies that folder."""
        found: dict[int, int] = {}
        for path in _listed(self._folder):
            match = _FINAL.fullmatch(path.name)
            if match and not path.is_symlink() and (path / MARKER).is_file():
                found[int(match[1])] = path.stat().st_ino
        return found

    def has(self, names: Iterable[str]) -> bool:
        """Whether all these folders are there."""
        return all((self._folder / name).is_dir() for name in names)

    def put(self, step: int, identity: int) -> Path | None:
        """Move a step's folder away, if it is the one that was meant; returns where it is now."""
        path = self._folder / final_name(step)
        with self._files.lock:
            if not path.is_dir() or path.stat().st_ino != identity:
                return None
            moved = self._move(path)
            if moved.stat().st_ino == identity:
                return moved
        # We were stopped just before the rename, and another leader made the step anew.
        self.put_back(step, moved)
        return None

    def put_back(self, step: int, moved: Path) -> None:
        """Give a step's folder its name again."""
        with self._files.lock:
            if not (self._folder / final_name(step)).exists():
                moved.rename(self._folder / final_name(step))

    def staged(self) -> list[Staged]:
        """What lies in the staging folder under a name that the coordinator gives."""
        found: list[Staged] = []
        for path in _listed(self._folder / STAGING):
            match = _STAGED.fullmatch(path.name)
            if match and not path.is_symlink():
                replaced = None if match[3] is None else int(match[3])
                found.append(Staged(path.name, int(match[1]), int(match[2]), replaced))
        return found

    def put_staged(self, name: str, grace: float) -> None:
        """Move a staged folder away, if nothing in it changed for ``grace`` seconds."""
        path = self._folder / STAGING / name
        with self._files.lock:
            if path.is_dir() and time.time() - _changed_at(path) > grace:
                self._move(path)

    def listed(self) -> list[Path]:
        """What is to be removed for good: what we moved away, or a leader before us left there."""
        found: list[Path] = []
        for path in _listed(self._folder / TRASH):
            ours = path.name.endswith(f".{self._token}")
            if ours or time.time() - path.stat().st_ctime > _OTHERS_STAY:
                found.append(path)
        return found

    def _move(self, path: Path) -> Path:
        trash = self._folder / TRASH
        trash.mkdir(exist_ok=True)
        target = trash / f"{path.name}.{time.time_ns()}.{self._token}"
        path.rename(target)
        return target


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _changed_at(folder: Path) -> float:
    """When anything in the folder changed last, or it was renamed, by the file system's clock."""
    newest = folder.stat().st_ctime
    for path in folder.rglob("*"):
        newest = max(newest, path.lstat().st_mtime)
    return newest
