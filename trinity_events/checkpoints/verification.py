"""Verification of a checkpoint's files before any of them is loaded.

1. Nothing is unpickled, mapped or loaded before the whole folder is verified: every listed file is
   there with its size and, in the mode ``full``, its digest; every file is listed.
2. The manifest of the outermost folder counts. A manifest of a folder inside of it may be of an
   earlier save.
3. If the reducer's mark names a manifest, the manifest is there and has that digest.
4. A Hugging Face folder whose list of digests the manifest lacks was completed after it: a resumed
   run saves its first version there. The folder's own list counts for its files, and the caller
   compares it (:meth:`CheckpointManifest.later_folders`).
5. A checkpoint without a manifest, of an earlier version, cannot be verified. The caller says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from ..errors import TrinityError
from .layout import (
    COMPLETING,
    FILE_DIGESTS,
    MANIFEST,
    VERIFIED,
    final_name,
    parse_final_name,
)
from .manifest import (
    LONGEST_MANIFEST,
    FileSum,
    ManifestUnreadable,
    digest_files,
    is_sealed,
    parse_manifest,
    saved_files,
)

VerifyMode: TypeAlias = Literal["full", "size", "off"]
"""Extent of a verification: sizes and digests, sizes alone, or none."""

HUGGING_FACE_CONFIG = "config.json"
"""File of a Hugging Face folder, where a list of digests may be that of a download."""
_DEEPEST = 2
"""Folders between a checkpoint and what an engine loads of it: ``actor/huggingface``."""


class CheckpointDamaged(TrinityError):
    """A file of a checkpoint is not as it was saved.

    Attributes:
        path: The file.
        reason: What is wrong with it.
        step: Step of the checkpoint; None if its folder is not that of a step.
        older: Step of the newest older checkpoint that is whole; None without one.
        command: What to type to continue from that checkpoint; None where it is not known.
    """

    path: Path
    reason: str
    step: int | None = None
    older: int | None = None
    command: str | None = None
    text = "{_what} is damaged: {path} {reason}: {_way_out}"

    @property
    def _what(self) -> str:
        return "the checkpoint" if self.step is None else f"the checkpoint of step {self.step}"

    def with_command(self, resume: str) -> CheckpointDamaged:
        """Return the error with the command that continues from the older checkpoint.

        Args:
            resume: Command that resumes the run from its newest checkpoint.
        """
        command = None if self.older is None else f"{resume} --from-step {self.older}"
        return replace(self, command=command)

    @property
    def _way_out(self) -> str:
        if self.older is None:
            return "restore it from a copy, or begin anew with --fresh"
        if self.command is None:
            return (
                f"the newest older checkpoint that is whole is of step {self.older} "
                f"(--from-step {self.older})"
            )
        return (
            f"continue from the newest older checkpoint that is whole, of step {self.older}, with "
            f"{self.command}"
        )


class ListedFile(NamedTuple):
    """File that a manifest lists."""

    path: Path
    sum: FileSum


class ManifestMark(Struct):
    """Part of the reducer's mark that a reader compares."""

    manifest: str | None = None
    kinds: tuple[str, ...] = ()


class CheckpointManifest:
    """Manifest of a folder of a checkpoint.

    Args:
        root: Folder of the manifest.
        folder: The folder to verify, which is the root or lies in it.
        sums: Files that the manifest lists below the folder, by their paths in the root.
    """

    def __init__(self, root: Path, folder: Path, sums: dict[str, FileSum]) -> None:
        self.root = root
        self.folder = folder
        self.sums = sums

    def later_folders(self) -> list[Path]:
        """Return the Hugging Face folders that were completed after the manifest was written."""
        # A folder that is being completed right now has no list of digests yet.
        marks = (*self.folder.rglob(FILE_DIGESTS), *self.folder.rglob(COMPLETING))
        return [
            folder
            for folder in sorted({mark.parent for mark in marks})
            if (folder / FILE_DIGESTS).relative_to(self.root).as_posix() not in self.sums
        ]

    def check_sizes(self) -> None:
        """Compare names and sizes. Raises CheckpointDamaged for the first that differs."""
        place = self.folder.relative_to(self.root)
        later = self.later_folders()
        try:
            sizes = {
                (place / name).as_posix(): size
                for name, size in saved_files(self.folder).items()
                if (self.folder / name).parent not in later
            }
        except OSError as error:
            raise self._damaged(self.folder, f"cannot be read ({error})") from None
        for name, file in self.sums.items():
            path = self.root / name
            if path.parent in later:
                continue
            nbytes = sizes.get(name)
            if nbytes is None:  # what was saved as a link is not among the files
                nbytes = path.stat().st_size if path.is_file() else None
            if nbytes is None:
                raise self._damaged(path, "is not there, and was saved")
            if file.bytes is not None and nbytes != file.bytes:
                raise self._damaged(path, f"has {nbytes} bytes, and {file.bytes} were saved")
        # Invariant 1: a file that was added could be loaded without any digest.
        for name in sorted(sizes.keys() - self.sums.keys()):
            raise self._damaged(self.root / name, f"is not listed in {self.root / MANIFEST}")

    def check_digests(
        self, part: int = 0, parts: int = 1, only: Collection[Path] | None = None
    ) -> None:
        """Compare the digests of one of several parts of the files, of about equal sizes.

        Args:
            part: Number of the part.
            parts: Number of all parts.
            only: Files to compare; None compares all.

        Raises:
            CheckpointDamaged: for the first that differs.
        """
        files = [file for file in self.files() if only is None or file.path in only]
        # Each rank digests its share: one reader of a large checkpoint would take the time of all.
        files = divide(files, parts)[part]
        try:
            digests = digest_files([file.path for file in files])
        except OSError as error:
            path = Path(error.filename or self.folder)
            raise self._damaged(path, f"cannot be read ({error.strerror})") from None
        for file, digest in zip(files, digests, strict=True):
            if digest.sha256 != file.sum.sha256:
                raise self._damaged(
                    file.path,
                    f"was changed: its sha256 is {digest.sha256[:16]}..., and "
                    f"{file.sum.sha256[:16]}... was saved",
                )

    def files(self) -> list[ListedFile]:
        """Return the listed files that are to be compared, in the order of their names."""
        later = self.later_folders()
        listed = (ListedFile(self.root / name, file) for name, file in sorted(self.sums.items()))
        return [file for file in listed if file.path.parent not in later]

    def _damaged(self, path: Path, reason: str) -> CheckpointDamaged:
        return damaged(path, reason, self.root)


def damaged(path: Path, reason: str, root: Path) -> CheckpointDamaged:
    """Make the error of a file, with the step of the folder that has the manifest."""
    return CheckpointDamaged(path, reason, _find_step(root))


def _find_step(folder: Path) -> int | None:
    """Return the step whose final folder a folder is, or lies in; None for any other."""
    folder = folder.absolute()
    near = (folder, *folder.parents)[: _DEEPEST + 1]
    steps = (parse_final_name(path.name) for path in near)
    return next((step for step in steps if step is not None), None)


def divide(files: Sequence[ListedFile], parts: int) -> list[list[ListedFile]]:
    """Divide files into parts of about equal sizes, alike in every process."""
    divided: list[list[ListedFile]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    # Largest first, each to the smallest part; paths break ties alike in every process.
    for file in sorted(files, key=lambda file: (-(file.sum.bytes or 0), file.path)):
        smallest = sizes.index(min(sizes))
        divided[smallest].append(file)
        sizes[smallest] += file.sum.bytes or 0
    return divided


def read_manifest(folder: Path) -> CheckpointManifest | None:
    """Read the manifest of a checkpoint, or of a folder in one; return None if there is none.

    Raises CheckpointDamaged if it was changed, or is gone although the reducer's mark names it.
    """
    folder = folder.absolute()
    # From the outermost folder inwards (invariant 2).
    for root in reversed((folder, *folder.parents)[: _DEEPEST + 1]):
        place = folder.relative_to(root).as_posix()
        manifest = _read(root, required=root == folder or parse_final_name(root.name) is not None)
        if manifest is None:
            continue
        below = {
            name: file
            for name, file in manifest.items()
            if root == folder or name == place or name.startswith(f"{place}/")
        }
        if below or root == folder or parse_final_name(root.name) is not None:
            return CheckpointManifest(root, folder, below)
    return None


def _read(root: Path, *, required: bool) -> dict[str, FileSum] | None:
    """Read the manifest of exactly this folder.

    Args:
        root: The folder.
        required: False to ignore a file that is no manifest of this project: a folder above may
            have a list of digests of its own.
    """
    path = root / MANIFEST
    expected = _read_mark(root).manifest if required else None
    try:
        with path.open("rb") as file:
            # Bounded: a damaged or foreign file may have any size.
            data = file.read(LONGEST_MANIFEST)
    except FileNotFoundError:
        if expected is not None:
            raise damaged(path, "is not there, and was written", root) from None
        return None
    except OSError as error:
        if not required:
            return None
        raise damaged(path, f"cannot be read ({error.strerror})", root) from None
    # A download of a model may bring its own SHA256SUMS, which lists other files.
    foreign = not required or (expected is None and (root / HUGGING_FACE_CONFIG).is_file())
    if foreign and not is_sealed(data):
        return None
    try:
        # A copy that an earlier version made has a plain list, and no mark that names it.
        sums = parse_manifest(data, sealed=expected is not None or is_sealed(data))
    except ManifestUnreadable as error:
        raise damaged(path, error.reason, root) from None
    # The seal finds accidents; only the mark shows that another manifest took its place.
    if expected is not None and expected != digest_manifest(data):
        raise damaged(path, f"has another digest than {root / VERIFIED} names", root)
    return sums


def digest_manifest(data: bytes) -> str:
    """Return the digest of a manifest, as the reducer's mark has it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _read_mark(root: Path) -> ManifestMark:
    """Return the reducer's mark; an empty one where there is none."""
    path = root / VERIFIED
    try:
        return msgspec.json.decode(path.read_bytes(), type=ManifestMark)
    except FileNotFoundError:
        return ManifestMark()
    # Without the mark a missing manifest would pass as one of an earlier version.
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        raise damaged(path, "cannot be read", root) from None


def verify_files(folder: Path, mode: VerifyMode = "full") -> bool:
    """Verify a checkpoint, or a folder in one; return False if it has no manifest.

    Raises CheckpointDamaged, without the older checkpoint.
    """
    if mode == "off":
        return True
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    manifest.check_sizes()
    if mode == "full":
        manifest.check_digests()
    return True


def find_newest_whole(run: Path, before: int) -> int | None:
    """Return the newest step before another whose checkpoint is whole; None without one.

    It reads all files of a checkpoint, and so is for the time when another one is damaged.
    """
    try:
        steps = [parse_final_name(path.name) for path in run.iterdir()]
    except OSError:
        return None
    # Newest first, because each look reads all files of a checkpoint.
    for step in sorted(
        (step for step in steps if step is not None and step < before), reverse=True
    ):
        folder = run / final_name(step)
        try:
            kinds = _read_mark(folder).kinds
            if kinds and "checkpoint" not in kinds:
                continue  # it has the weights of a version alone
            if verify_files(folder):
                return step
        except CheckpointDamaged:
            continue
    return None


def with_older(error: CheckpointDamaged) -> CheckpointDamaged:
    """Return the error with the newest older checkpoint that is whole."""
    if error.step is None:
        return error
    path, name = error.path.absolute(), final_name(error.step)
    # The damaged file lies below the step's folder, whose parent is the run's.
    run = next(folder.parent for folder in (path, *path.parents) if folder.name == name)
    return CheckpointDamaged(
        error.path, error.reason, error.step, find_newest_whole(run, error.step), error.command
    )
