"""Checkpoint directory of a run: promote staged folders and write iteration files."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..checkpoint_layout import MADE_FROM, final_name, replaced_name
from ..core import FilePlan, IterationFile, Promotion
from ..errors import CheckpointRootUnusable
from ..open_folder import OpenFolder, UnsafePath, leads_out, parts_of
from ..server import make_home, trinity_home

__all__ = ["CheckpointFiles", "UnsafePath", "writable_root"]

logger = logging.getLogger(__name__)
_LONGEST_MARK = 4096
"""Bytes read of a :data:`MADE_FROM` file; it holds one path."""
_LONGEST_STEP = 64
"""Bytes read of an iteration file; a longer file is written anew."""


def writable_root(root: Path) -> Path:
    """Create the root and write a file to test it. Raises CheckpointRootUnusable."""
    try:
        if root.is_relative_to(trinity_home()):
            make_home(trinity_home())
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root.resolve()
    except OSError as error:
        raise CheckpointRootUnusable(
            f"the checkpoint root {root} cannot be written ({error.strerror}): "
            "choose another with --checkpoint-root, or make it writable"
        ) from None


class CheckpointFiles:
    """Checkpoint directory of one run, ``ROOT/RUN``.

    Every operation is idempotent: it skips what is already done, so that after a crash it
    completes the rest. The root may be a link. The run's folder and the folders below it may
    not, so that no operation changes a file outside.

    Args:
        root: The checkpoint root.
        run_id: The run.
        claim: Called with the run's open folder before each use; it may raise FolderTaken.
    """

    def __init__(
        self, root: Path, run_id: str, claim: Callable[[OpenFolder], None] = lambda run: None
    ) -> None:
        self.folder = root / run_id
        self.lock = threading.Lock()
        """Held while folders are renamed."""
        self._claim = claim
        self.faults: dict[str, str] = {}
        """Files that cannot be written now, each with the error in words."""

    @contextmanager
    def opened(self, *, create: bool = False) -> Iterator[OpenFolder]:
        """Open the run's folder.

        Raises FileNotFoundError, UnsafePath if it is a link, and what ``claim`` raises.
        """
        with OpenFolder.of_run(self.folder, create=create) as run:
            self._claim(run)
            yield run

    def claim(self) -> None:
        """Create the run's folder if it is absent, and claim it."""
        with self.opened(create=True):
            pass

    def reconcile(self, plan: FilePlan) -> bool:
        """Promote folders, then write the iteration files, so that they name existing folders.

        Return True if any folder was promoted.
        """
        promoted = 0
        with self.lock:
            self._forget_all_but(plan)
            for promotion in plan.promotions:
                promoted += self._attempt(promotion.staged, partial(self._promote, promotion))
            for iteration in plan.iterations:
                self._attempt(iteration.name, partial(self._point, iteration))
        return promoted > 0

    def _attempt(self, what: str, act: Callable[[], bool]) -> bool:
        """Return True if the act changed anything."""
        # A disk that is full for a while must not stop the run: the next call tries again.
        try:
            changed = act()
            self.faults.pop(self._in_words(what), None)
        except OSError as error:
            if self._in_words(what) not in self.faults:
                logger.error("%s of %s: %s", what, self.folder, error)
            self.faults[self._in_words(what)] = str(error)
            return False
        return changed

    def _forget_all_but(self, plan: FilePlan) -> None:
        """Forget the faults of files that are no longer planned, and so are tried no more."""
        planned = {one.staged for one in plan.promotions} | {one.name for one in plan.iterations}
        words = {self._in_words(one) for one in planned}
        for gone in self.faults.keys() - words:
            del self.faults[gone]

    def _in_words(self, what: str) -> str:
        return f"{what} of {self.folder}"

    def _promote(self, promotion: Promotion) -> bool:
        *above, name = parts_of(promotion.staged, self.folder)
        try:
            with self.opened() as run, run.below(*above) as staging:
                return self._promote_in(run, staging, name, promotion)
        except FileNotFoundError:
            return False  # promoted before

    def _promote_in(
        self, run: OpenFolder, staging: OpenFolder, name: str, promotion: Promotion
    ) -> bool:
        if staging.is_link(name):
            raise leads_out(promotion.staged, self.folder)
        if not staging.is_folder(name):
            return False  # promoted before
        final = final_name(promotion.step)
        there = run.stat(final) is not None
        # Promoted before: a late writer has made the staged folder again.
        if there and (promotion.only_if_absent or made_from(run, final) == promotion.staged):
            return False
        added = self._added(run, staging, promotion)
        with staging.below(name) as staged:
            if added is not None:
                above, last = added
                with above.below(last) as source:
                    _link_missing(source, staged)
            staged.write(MADE_FROM, promotion.staged.encode())
        old = replaced_name(name, final)
        if there:
            run.rename(final, staging, old)
        staging.rename(name, run, final)
        if added is not None:
            staging.remove(old if added[0] is run else added[1])
        run.sync()
        return True

    def _added(
        self, run: OpenFolder, staging: OpenFolder, promotion: Promotion
    ) -> tuple[OpenFolder, str] | None:
        """Find the state dict that a promotion adds: a staged folder, or one with its name."""
        if promotion.adds is None:
            return None
        name, final = parts_of(promotion.adds, self.folder)[-1], final_name(promotion.step)
        if staging.is_folder(name):
            return staging, name
        return (run, final) if made_from(run, final) == promotion.adds else None

    def _point(self, iteration: IterationFile) -> bool:
        if iteration.needs is not None and not (self.folder / iteration.needs).is_dir():
            raise FileNotFoundError(
                f"{iteration.needs} is not there, so {iteration.name} does not name it"
            )
        with self.opened(create=True) as run:
            step = str(iteration.step).encode()
            if run.read(iteration.name, _LONGEST_STEP) == step:
                return False
            run.remove_abandoned(iteration.name)
            run.write(iteration.name, step)
            return True


def made_from(folder: OpenFolder, name: str) -> str | None:
    """Return the staged folder that a folder below was made from; None if it has no mark."""
    try:
        with folder.below(name) as made:
            mark = made.read(MADE_FROM, _LONGEST_MARK)
    except OSError:
        return None
    return None if mark is None else mark.decode(errors="replace")


def _link_missing(source: OpenFolder, target: OpenFolder) -> None:
    """Link the files of ``source`` that ``target`` lacks; ``source`` keeps its files."""
    for above, folder in source.walk():
        files = [name for name in folder.names() if folder.is_file(name)]
        if not files:
            continue
        with target.below(*above, create=True) as own:
            for name in files:
                if own.stat(name) is None:
                    os.link(
                        name,
                        name,
                        src_dir_fd=folder.descriptor,
                        dst_dir_fd=own.descriptor,
                        follow_symlinks=False,
                    )
