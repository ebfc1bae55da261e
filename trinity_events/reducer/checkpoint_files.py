"""Checkpoint directory of a run: promote staged folders and write iteration files."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from ..checkpoints.layout import (
    MADE_FROM,
    SAVED_IN_PLACE,
    final_name,
    format_in_place,
    parse_final_name,
    replaced_name,
)
from ..core import Evidence, FilePlan, InPlace, IterationFile, Promotion
from ..errors import CheckpointRootUnusable
from ..server import make_home, trinity_home
from ..system.open_folder import OpenFolder, UnsafePath, leads_out, parts_of
from .checkpoint_evidence import (
    NotVerified,
    check_names,
    check_promotion,
    check_saves,
    has_files,
    load_evidence,
    write_evidence,
)

__all__ = ["CheckpointFiles", "UnsafePath", "writable_root"]

logger = logging.getLogger(__name__)
_LONGEST_MARK = 4096
"""Bytes read of a :data:`MADE_FROM` file; it holds one path."""
_LONGEST_STEP = 64
"""Bytes read of an iteration file; a longer file is written again."""


def writable_root(root: Path) -> Path:
    """Create the root and write a file to test it. Raises CheckpointRootUnusable."""
    try:
        if root.is_relative_to(trinity_home()):
            make_home(trinity_home())
        root.mkdir(parents=True, exist_ok=True)
        # Permission bits show neither a read-only mount nor a full disk.
        with tempfile.TemporaryFile(dir=root):
            return root.resolve()
    except OSError as error:
        raise CheckpointRootUnusable(root, error.strerror or str(error)) from None


class CheckpointFiles:
    """Checkpoint directory of one run, ``ROOT/RUN``.

    Every operation is idempotent: it skips what is already done, so that after a crash it
    completes the rest. The root may be a link. The run's folder and the folders below it may
    not, so that no operation changes a file outside.

    The log decides which step is to have a name. The disk decides if the step has it: a staged
    folder is checked before it is renamed, and an iteration file names a step with evidence only
    (:mod:`.checkpoint_evidence`).

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
        self.promoted = 0
        """Number of folders that this process gave their final name."""
        self._unproven: set[str] = set()
        """Iteration files whose newest step has saves that name no folder."""

    @contextmanager
    def opened(self, *, create: bool = False) -> Iterator[OpenFolder]:
        """Open the run's folder.

        Raises FileNotFoundError, UnsafePath if it is a link, and what ``claim`` raises.
        """
        with OpenFolder.open_run(self.folder, create=create) as run:
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
        before = self.promoted
        # Retention moves folders in a thread of its own (`CheckpointTrash.move`).
        with self.lock:
            self._forget_all_but(plan)
            for promotion in plan.promotions:
                self.promoted += self._attempt(
                    _format_promotion(promotion), partial(self._promote, promotion)
                )
            for in_place in plan.in_place:
                self.promoted += self._attempt(
                    _format_in_place(in_place), partial(self._check_in_place, in_place)
                )
            for iteration in plan.iterations:
                self._attempt(iteration.name, partial(self._write_iteration, iteration, plan))
        return self.promoted > before

    def _attempt(self, what: str, act: Callable[[], bool]) -> bool:
        """Return True if the act changed anything."""
        # A disk that is full for a while must not stop the run: the next call tries again.
        try:
            changed = act()
            self.faults.pop(self._format_fault(what), None)
        except OSError as error:
            if self._format_fault(what) not in self.faults:
                logger.error("%s of %s: %s", what, self.folder, error)
            self.faults[self._format_fault(what)] = str(error)
            return False
        return changed

    def _forget_all_but(self, plan: FilePlan) -> None:
        """Forget the faults of files that are no longer planned, and so are tried no more."""
        planned = {_format_promotion(promotion) for promotion in plan.promotions}
        planned |= {iteration.name for iteration in plan.iterations}
        planned |= {_format_in_place(in_place) for in_place in plan.in_place}
        words = {self._format_fault(subject) for subject in planned}
        for gone in self.faults.keys() - words:
            del self.faults[gone]

    def _format_fault(self, what: str) -> str:
        return f"{what} of {self.folder}"

    def _promote(self, promotion: Promotion) -> bool:
        *above, name = parts_of(promotion.staged, self.folder)
        try:
            with self.opened() as run, run.below(*above) as staging:
                return self._promote_folder(run, staging, name, promotion)
        except FileNotFoundError:
            return False  # promoted before

    def _promote_folder(
        self, run: OpenFolder, staging: OpenFolder, name: str, promotion: Promotion
    ) -> bool:
        if staging.is_link(name):
            raise leads_out(promotion.staged, self.folder)
        if not staging.is_folder(name):
            return False  # promoted before
        final = final_name(promotion.step)
        there = run.stat(final) is not None
        # Promoted before: a late writer has made the staged folder again.
        if there and (promotion.only_if_absent or read_made_from(run, final) == promotion.staged):
            return False
        origin = check_names(promotion, self.folder)
        added = self._find_added(run, staging, promotion)
        with staging.below(name) as staged:
            # Before the check, which looks for the saves of both kinds in this folder.
            if added is not None:
                above, last = added
                with above.below(last) as source:
                    _link_missing(source, staged)
            write_evidence(staged, check_promotion(promotion, origin, staged))
            # Both marks before the rename: wherever this process dies, the final folder has them.
            staged.write(MADE_FROM, promotion.staged.encode())
        old = replaced_name(name, final)
        # After a death between the two renames the staged folder is still there: the next call
        # completes the promotion.
        if there:
            run.rename(final, staging, old)
        staging.rename(name, run, final)
        if added is not None:
            staging.remove(old if added[0] is run else added[1])
        # A rename lasts through a crash of the host only once its folder is synced.
        run.sync()
        return True

    def _check_in_place(self, in_place: InPlace) -> bool:
        """Give the final folder of saves that were not staged its evidence, for retention.

        Only a folder that a saver of this epoch and step marked gets it. It has no manifest: what
        else the caller writes into its own folder is not known.
        """
        name = final_name(in_place.step)
        with ExitStack() as exits:
            run = exits.enter_context(self.opened())
            if not run.is_folder(name):
                return False  # removed, or kept where the reducer does not see it
            folder = exits.enter_context(run.below(name))
            mark = folder.read(SAVED_IN_PLACE, _LONGEST_MARK)
            expected = format_in_place(in_place.epoch, in_place.step).encode()
            if mark != expected or folder.is_file(MADE_FROM) or not has_files(folder):
                return False
            evidence = Evidence(
                epoch=in_place.epoch,
                step=in_place.step,
                kinds=in_place.kinds,
                saves=len(in_place.saves),
            )
            with suppress(NotVerified):
                earlier = load_evidence(run, in_place.step)
                if earlier is not None and _covers(earlier, evidence):
                    return False
            check_saves(in_place.step, run, in_place.saves)
            write_evidence(folder, evidence)
        return True

    def _find_added(
        self, run: OpenFolder, staging: OpenFolder, promotion: Promotion
    ) -> tuple[OpenFolder, str] | None:
        """Find the state dict that a promotion adds: a staged folder, or one with its name."""
        if promotion.adds is None:
            return None
        name, final = parts_of(promotion.adds, self.folder)[-1], final_name(promotion.step)
        if staging.is_folder(name):
            return staging, name
        return (run, final) if read_made_from(run, final) == promotion.adds else None

    def _write_iteration(self, iteration: IterationFile, plan: FilePlan) -> bool:
        """Write the iteration file. Raises NotVerified if the newest ready step has no evidence.

        The file then names the newest older step that has some: neither an invented step nor a
        folder that was removed by hand keeps later checkpoints from being named.
        """
        with self.opened(create=True) as run:
            unproven: NotVerified | None = None
            try:
                _check_folder(run, iteration)
                step: int | None = iteration.at.step
            except NotVerified as error:
                unproven, step = error, _newest_proven(run, iteration, plan)
            changed = step is not None and _write_step(run, iteration.name, step)
        if unproven is not None and iteration.has_folder:
            raise unproven
        self._log_unproven(iteration.name, unproven)
        return changed

    def _log_unproven(self, name: str, error: NotVerified | None) -> None:
        """Log that the saves of a step named no folder, and that none has its name.

        It is no fault of the disk: the files may be wherever the caller keeps them. Such a run has
        no folder at any step, so the line comes again only after a step that had one.
        """
        if error is None:
            self._unproven.discard(name)
        elif name not in self._unproven:
            logger.warning(
                "%s does not name the newest ready step: %s (later steps without files are not "
                "reported)",
                *(name, error),
            )
            self._unproven.add(name)


def _covers(earlier: Evidence, evidence: Evidence) -> bool:
    return earlier.epoch == evidence.epoch and set(evidence.kinds) <= set(earlier.kinds)


def _format_in_place(in_place: InPlace) -> str:
    return f"{final_name(in_place.step)} in place"


def _format_promotion(promotion: Promotion) -> str:
    """Format what a promotion makes; a folder may be named by several steps."""
    return f"{promotion.staged} as {final_name(promotion.step)}"


def _check_folder(run: OpenFolder, iteration: IterationFile) -> None:
    """Raise NotVerified unless the folder of the newest ready step is there, and is of this step.

    A folder that the reducer did not make was saved to in place, or copied by hand.
    """
    at, path = iteration.at, run.path / final_name(iteration.at.step)
    evidence = load_evidence(run, at.step, iteration.kinds)
    if evidence is None or iteration.saves:  # those in place may be newer than their evidence
        check_saves(at.step, run, iteration.saves)
    elif evidence.epoch != at.epoch and not iteration.resumed:
        raise NotVerified(at.step, path, f"is of epoch {evidence.epoch}, and not of {at.epoch}")
    elif iteration.kind not in evidence.kinds and (evidence.kinds or not iteration.resumed):
        kinds = " and ".join(evidence.kinds) or "no kind"
        raise NotVerified(at.step, path, f"was verified as {kinds}, and not as {iteration.kind}")


def _newest_proven(run: OpenFolder, iteration: IterationFile, plan: FilePlan) -> int | None:
    """Return the newest step up to the ready one that the file may name; None to leave the file.

    A step that the file names already counts if its folder was saved to in place.
    """
    text = run.read(iteration.name, _LONGEST_STEP) or b""
    named = int(text) if text.isdigit() else None
    steps = [step for name in run.names() if (step := parse_final_name(name)) is not None]
    for step in sorted((step for step in steps if step <= iteration.at.step), reverse=True):
        with suppress(OSError):
            evidence = load_evidence(run, step)
            if evidence is None and step == named:
                return None
            if (
                evidence is not None
                and iteration.kind in evidence.kinds
                and plan.covers(evidence.epoch, step)
            ):
                return step
    return None


def _write_step(run: OpenFolder, name: str, step: int) -> bool:
    """Write an iteration file; return False if it names the step already."""
    text = str(step).encode()
    if run.read(name, _LONGEST_STEP) == text:
        return False
    # Writers that died left temporary files, which have random names and would add up.
    run.remove_abandoned(name)
    run.write(name, text)
    return True


def read_made_from(folder: OpenFolder, name: str) -> str | None:
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
                    # A link takes no space and no time, and `source` stays whole if this process
                    # dies.
                    os.link(
                        name,
                        name,
                        src_dir_fd=folder.descriptor,
                        dst_dir_fd=own.descriptor,
                        follow_symlinks=False,
                    )
