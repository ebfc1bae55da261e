"""Brings a run's checkpoint directory in step with the state: promotes folders, moves pointers."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from ..core import FilePlan, IterationFile, Promotion, final_name
from ..errors import CheckpointRootUnusable

logger = logging.getLogger(__name__)


MARKER = ".made_from"
"""Names the staged folder that a checkpoint was made from."""


class UnsafePath(ValueError):
    """A path from an event that leads out of the run's checkpoint directory."""


def writable_root(root: Path) -> Path:
    """Create the root and prove that it can be written. Raises CheckpointRootUnusable."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root.resolve()
    except OSError as error:
        raise CheckpointRootUnusable(
            f"the checkpoint root {root} cannot be written ({error.strerror}): "
            "choose another with --checkpoint-root, or make it writable"
        ) from None


class CheckpointFiles:
    """The checkpoint directory of one run, ``ROOT/RUN``.

    Idempotent: what is already as planned is left alone, so that it may run as often as one
    likes, and after a crash does what the crash left undone.
    """

    def __init__(self, root: Path, run_id: str) -> None:
        self.folder = root / run_id
        self.lock = threading.Lock()
        """Held while folders get their names, or lose them."""
        self._reported: set[str] = set()

    def reconcile(self, plan: FilePlan) -> None:
        """Promote, then write the iteration files, so that they never name what is not there."""
        with self.lock:
            for promotion in plan.promotions:
                self._attempt(promotion.staged, lambda p=promotion: self._promote(p))  # type: ignore[misc]
            for iteration in plan.iterations:
                self._attempt(iteration.name, lambda i=iteration: self._point(i))  # type: ignore[misc]

    def _attempt(self, what: str, act: Callable[[], None]) -> None:
        # A disk that is full for a while must not stop the run: the next turn tries again.
        try:
            act()
            self._reported.discard(what)
        except (OSError, UnsafePath) as error:
            if what not in self._reported:
                self._reported.add(what)
                logger.error("%s of %s: %s", what, self.folder, error)

    def _promote(self, promotion: Promotion) -> None:
        staged = inside(self.folder, promotion.staged)
        if not staged.is_dir():
            return  # promoted before
        target = inside(self.folder, final_name(promotion.step))
        if target.exists():
            # Made from this folder before: what is there again is a late writer's.
            if promotion.only_if_absent or _made_from(target) == promotion.staged:
                return
            if promotion.adds_to:
                _link_missing(target, staged)
            (staged / MARKER).write_text(promotion.staged)
            old = staged.parent / f"{staged.name}.replaced_{target.name}"
            target.rename(old)
            staged.rename(target)
            if promotion.adds_to:
                shutil.rmtree(old)
        else:
            (staged / MARKER).write_text(promotion.staged)
            staged.rename(target)
        _sync_folder(self.folder)

    def _point(self, iteration: IterationFile) -> None:
        text, path = str(iteration.step), self.folder / iteration.name
        if iteration.needs is not None and not (self.folder / iteration.needs).is_dir():
            raise FileNotFoundError(f"{iteration.needs} is not there, so it is not pointed to")
        try:
            if path.read_text() == text:
                return
        except (FileNotFoundError, UnicodeDecodeError):
            pass
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{iteration.name}.{socket.gethostname()}-{os.getpid()}"
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(self.folder)


def _made_from(target: Path) -> str | None:
    try:
        return (target / MARKER).read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _link_missing(source: Path, target: Path) -> None:
    """Give ``target`` the files of ``source`` that it lacks; readers of ``source`` keep theirs."""
    for path in source.rglob("*"):
        own = target / path.relative_to(source)
        if path.is_file() and not path.is_symlink() and not own.exists():
            own.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, own)


def inside(folder: Path, relative: str) -> Path:
    """``folder / relative``, refused when it leads out of the folder, by links too."""
    if "\0" in relative:
        raise UnsafePath(f"path {relative!r} is no path and is not used")
    path = folder / relative
    if not path.resolve().is_relative_to(folder.resolve()) or path.resolve() == folder.resolve():
        raise UnsafePath(f"path {relative!r} leads out of {folder} and is not used")
    return path


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
