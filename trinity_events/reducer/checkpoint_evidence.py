"""Evidence that a folder holds the saves of a step: what counts is on the disk, not in the log.

1. The reducer checks a staged folder before it gives the folder its final name: the folder's own
   name says the epoch and the step, and each save whose path and size the state has is there.
2. It then writes the mark :data:`VERIFIED` into the folder, durably and before the rename. A later
   leader reads the mark and checks no file again.
3. A folder counts for the step of its mark alone, and only while it has files.
4. No event can make, change or move a mark.
5. A folder of version 0.1 has no mark. It gets one at the first look if the name of its staged
   folder says this step and it has files. Sizes are not compared: the state drops those of older
   steps, and version 0.1 renamed no folder before all of its saves had finished.

A manifest with the size and digest of each file, written by the saver before the rename, is to
take the place of the sizes in the log: :func:`check_saves` is where it is to be compared.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

from trinity_schemas import Kind

from ..checkpoint_layout import (
    MADE_FROM,
    REDUCER_FILES,
    VERIFIED,
    StagedFolder,
    final_name,
    parse_made_from,
)
from ..core import Evidence, Promotion, SavedFile
from ..system.open_folder import OpenFolder, parts_of

_LONGEST_MARK = 4096
"""Bytes read of a mark; one of this program has about 80."""
_decoder = msgspec.json.Decoder(Evidence)


class NotVerified(OSError):
    """A folder that does not count for a step, whatever the log says of the step.

    Args:
        step: The step.
        folder: Folder that was looked at.
        reason: What the folder lacks.
    """

    def __init__(self, step: int, folder: Path, reason: str) -> None:
        super().__init__(f"step {step} has no verified files: {folder} {reason}")
        self.step = step
        self.folder = folder
        self.reason = reason


def check_names(promotion: Promotion, run: Path) -> None:
    """Raise NotVerified if a folder of a promotion is of another step by its name.

    Call it before anything in these folders changes: the log may name those of other steps.
    """
    _origin_of(promotion, run)


def check_promotion(promotion: Promotion, run: Path, staged: OpenFolder) -> Evidence:
    """Check a staged folder, with all files of its step in it; return its evidence.

    Raises NotVerified if it is the folder of another step, or lacks a save.
    """
    origin = _origin_of(promotion, run)
    if not has_files(staged):
        raise NotVerified(promotion.step, staged.path, "has no files")
    check_saves(promotion.step, staged, promotion.saves)
    return Evidence(
        epoch=origin.epoch,
        step=origin.step,
        kinds=promotion.kinds,
        saves=len(promotion.saves),
    )


def _origin_of(promotion: Promotion, run: Path) -> StagedFolder:
    """Return what the staged folder is of by its name. Raises NotVerified for another step."""
    step = promotion.step
    origin = parse_made_from(promotion.staged)
    if origin is None:
        reason = "has a name without epoch and step, so it is not used"
        raise NotVerified(step, run / promotion.staged, reason)
    added = origin if promotion.adds is None else parse_made_from(promotion.adds)
    epochs = (None, origin.epoch)
    if origin.step != step or promotion.epoch not in epochs:
        reason = f"is of step {origin.step} of epoch {origin.epoch} by its name"
        raise NotVerified(step, run / promotion.staged, reason)
    if added is None or (added.epoch, added.step) != (origin.epoch, origin.step):
        reason = f"is not of step {step} of epoch {origin.epoch} by its name"
        raise NotVerified(step, run / (promotion.adds or ""), reason)
    return origin


def check_saves(step: int, folder: OpenFolder, saves: Iterable[SavedFile]) -> None:
    """Compare saves with the disk by their sizes. Raises NotVerified for the first that differs.

    The target of a link is not looked at. A folder may have more bytes than its save reported,
    since other saves may write to it too.
    """
    for save in saves:
        path = folder.path / save.path
        try:
            nbytes, is_exact = _size_of(folder, save.path)
        except (FileNotFoundError, NotADirectoryError):
            raise NotVerified(step, path, "is not there") from None
        if nbytes is not None and (nbytes < save.bytes or (is_exact and nbytes > save.bytes)):
            raise NotVerified(step, path, f"has {nbytes} bytes, and {save.bytes} were saved")


def write_evidence(folder: OpenFolder, evidence: Evidence) -> None:
    """Write the mark of a folder that was checked."""
    folder.write(VERIFIED, msgspec.json.encode(evidence))


def load_evidence(
    run: OpenFolder, step: int, kinds: tuple[Kind, ...] | None = None
) -> Evidence | None:
    """Return the evidence of a step's folder; None for a folder that the reducer did not make.

    Args:
        run: The run's directory.
        step: The step.
        kinds: Kinds that the log has as complete, by which a folder of version 0.1 gets its mark;
            None gives it none.

    Raises:
        NotVerified: The folder is absent, has no files, or is not of this step.
        OSError: The folder cannot be read.
    """
    name = final_name(step)
    path = run.path / name
    if not run.is_folder(name):
        reason = "is not there" if run.stat(name) is None else "is no folder"
        raise NotVerified(step, path, reason)
    with run.below(name) as folder:
        if not has_files(folder):
            raise NotVerified(step, path, "has no files")
        mark = folder.read(VERIFIED, _LONGEST_MARK)
        if mark is None:
            return _adopt(folder, step, kinds)
    try:
        evidence = _decoder.decode(mark)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise NotVerified(step, path, f"has a {VERIFIED} that is not readable") from None
    if evidence.step != step:
        raise NotVerified(step, path, f"was verified as step {evidence.step}")
    return evidence


def has_files(folder: OpenFolder) -> bool:
    """Return True if a folder, or one below it, has a file that a save wrote, or a link."""
    return any(
        name not in REDUCER_FILES and (below.is_file(name) or below.is_link(name))
        for _, below in folder.walk()
        for name in below.names()
    )


def _adopt(folder: OpenFolder, step: int, kinds: tuple[Kind, ...] | None) -> Evidence | None:
    """Give a folder of version 0.1 its mark, so that later events cannot change what it counts as.

    Return None for a folder that no reducer made.
    """
    mark = folder.read(MADE_FROM, _LONGEST_MARK)
    if mark is None:
        return None
    made_from = mark.decode(errors="replace")
    origin = parse_made_from(made_from)
    if origin is None or origin.step != step:
        raise NotVerified(step, folder.path, f"was made from {made_from!r}")
    if kinds is None:
        raise NotVerified(step, folder.path, f"has no {VERIFIED} yet")
    evidence = Evidence(epoch=origin.epoch, step=step, kinds=kinds)
    write_evidence(folder, evidence)
    return evidence


def _size_of(folder: OpenFolder, path: str) -> tuple[int | None, bool]:
    """Return the bytes at a path, and True for those of a single file; None where links lead on."""
    if path in ("", "."):
        return _total(folder), False
    *above, name = parts_of(path, folder.path)
    with folder.below(*above) as holder:
        status = holder.stat(name)
        if status is None:
            raise FileNotFoundError
        if stat.S_ISDIR(status.st_mode):
            with holder.below(name) as saved:
                return _total(saved), False
        return (status.st_size if stat.S_ISREG(status.st_mode) else None), True


def _total(folder: OpenFolder) -> int | None:
    """Return the bytes of all files below a folder; None if one of them is a link."""
    total = 0
    for _, below in folder.walk():
        for name in below.names():
            status = below.stat(name)
            if status is not None and stat.S_ISLNK(status.st_mode):
                return None
            if status is not None and stat.S_ISREG(status.st_mode) and name not in REDUCER_FILES:
                total += status.st_size
    return total
