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
6. The savers have listed what they wrote, with sizes and digests. Before the rename, the lists are
   joined in the manifest of the folder, the sizes in it are compared with the disk, and the mark
   gets its digest (:func:`join_manifest`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import msgspec

from trinity_schemas import Kind

from ..checkpoints.layout import (
    MADE_FROM,
    MANIFEST,
    MANIFEST_PARTS,
    REDUCER_FILES,
    VERIFIED,
    StagedFolder,
    final_name,
    is_saved_file,
    parse_made_from,
)
from ..checkpoints.manifest import (
    LONGEST_MANIFEST,
    FileSum,
    ManifestUnreadable,
    digest_opened,
    format_manifest,
    parse_manifest,
)
from ..checkpoints.verification import digest_manifest
from ..core import Evidence, Promotion, SavedFile
from ..errors import StructuredError
from ..system.open_folder import OpenFolder, parts_of

_LONGEST_MARK = 4096
"""Bytes read of a mark; one of this program has about 80."""
# msgspec raises UnicodeDecodeError and not its own error for text that is not UTF-8.
_decoder = msgspec.json.Decoder(Evidence)


class NotVerified(StructuredError, OSError):
    """A folder that does not count for a step, whatever the log says of the step.

    Attributes:
        step: The step.
        folder: Folder that was looked at.
        reason: What the folder lacks.
    """

    step: int
    folder: Path
    reason: str
    text = "step {step} has no verified files: {folder} {reason}"


def check_promotion(promotion: Promotion, origin: StagedFolder, staged: OpenFolder) -> Evidence:
    """Check a staged folder, with all files of its step in it; return its evidence.

    Raises NotVerified if it lacks a save.

    Args:
        promotion: The promotion.
        origin: Result of :func:`check_names`.
        staged: The staged folder.
    """
    if not has_files(staged):
        raise NotVerified(promotion.step, staged.path, "has no files")
    check_saves(promotion.step, staged, promotion.saves)
    return Evidence(
        epoch=origin.epoch,
        step=origin.step,
        kinds=promotion.kinds,
        saves=len(promotion.saves),
        manifest=join_manifest(promotion.step, staged),
    )


def join_manifest(step: int, folder: OpenFolder) -> str | None:
    """Write the manifest of a staged folder from the lists of its saves; return its digest.

    A file that no save listed is digested here, as is one that two saves wrote: the reducer cannot
    know which came last, but one of them must have written what is there. Without any list, of
    savers of an earlier version, there is no manifest.

    Raises NotVerified if a file is not as a save listed it.
    """
    listed = _listed_sums(step, folder)
    if listed is None:
        return None
    sums: dict[str, FileSum] = {}
    for above, below in folder.walk():
        for name in below.names():
            path = str(PurePosixPath(*above, name))
            if below.is_file(name) and is_saved_file(PurePosixPath(path)):
                sums[path] = _check_sum(step, below, name, listed.pop(path, set()))
    for path in listed:
        if not (folder.path / path).is_symlink():  # a save may have listed a link to a file
            raise NotVerified(step, folder.path / path, "is not there, and was saved")
        sums[path] = next(iter(listed[path]))
    manifest = format_manifest(sums)
    folder.write(MANIFEST, manifest)
    # After the manifest: a death in between leaves both, and `_listed_sums` reads both.
    folder.remove(MANIFEST_PARTS)
    return digest_manifest(manifest)


def _listed_sums(step: int, folder: OpenFolder) -> dict[str, set[FileSum]] | None:
    """Return what the saves of a folder listed for each file; None without any list.

    The manifest counts too, of a folder that was joined before, or whose files were added.
    """
    listed: dict[str, set[FileSum]] = {}
    lists = [(folder.path / MANIFEST, folder.read(MANIFEST, LONGEST_MANIFEST))]
    if folder.is_folder(MANIFEST_PARTS):
        with folder.below(MANIFEST_PARTS) as parts:
            lists += [
                (parts.path / name, parts.read(name, LONGEST_MANIFEST))
                for name in sorted(parts.names())
                # Unfinished files have such names until they are renamed: a saver died, or writes.
                if not name.startswith(".")
            ]
    present = [(path, data) for path, data in lists if data is not None]
    if not present:
        return None
    for path, data in present:
        try:
            for name, file in parse_manifest(data).items():
                listed.setdefault(name, set()).add(file)
        except ManifestUnreadable as error:
            raise NotVerified(step, path, error.reason) from None
    return listed


def _check_sum(step: int, folder: OpenFolder, name: str, listed: set[FileSum]) -> FileSum:
    """Return the sum of a file. Raises NotVerified if it is none of those listed."""
    if len(listed) == 1:
        [file] = listed
        status = folder.stat(name)
        if status is None or status.st_size != file.bytes:
            nbytes = "no" if status is None else status.st_size
            reason = f"has {nbytes} bytes, and {file.bytes} were saved"
            raise NotVerified(step, folder.path / name, reason)
        return file
    # Another process may put a link in the file's place, which leads out of the folder. A pipe
    # there would block the reducer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=folder.descriptor), "rb", buffering=0) as opened:
        file = digest_opened(opened)
    if listed and file not in listed:
        raise NotVerified(step, folder.path / name, "is not what any of its saves wrote")
    return file


def check_names(promotion: Promotion, run: Path) -> StagedFolder:
    """Return epoch and step of a promotion by the names of its folders.

    Call it before anything in these folders changes: the log may name those of other steps.

    Raises NotVerified if a folder is of another step.
    """
    step = promotion.step
    origin = parse_made_from(promotion.staged)
    if origin is None:
        reason = "has a name without epoch and step, so it is not used"
        raise NotVerified(step, run / promotion.staged, reason)
    added = origin if promotion.adds is None else parse_made_from(promotion.adds)
    # The state has no epoch for promotions that earlier epochs left (`plan_files`).
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
            nbytes, is_exact = _measure(folder, save.path)
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
        for above, below in folder.walk()
        if MANIFEST_PARTS not in above
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


def _measure(folder: OpenFolder, path: str) -> tuple[int | None, bool]:
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
    for above, below in folder.walk():
        if MANIFEST_PARTS in above:
            continue
        for name in below.names():
            status = below.stat(name)
            if status is not None and stat.S_ISLNK(status.st_mode):
                return None
            if status is not None and stat.S_ISREG(status.st_mode) and name not in REDUCER_FILES:
                total += status.st_size
    return total
