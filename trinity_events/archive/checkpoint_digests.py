"""Comparison of a run's checkpoint files with the digests in its log."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from trinity_schemas import Envelope, SaveFinished

from ..checkpoints.layout import (
    FILE_DIGESTS,
    MADE_FROM,
    MANIFEST_PARTS,
    REDUCER_FILES,
    STAGING,
    combine_digests,
    parse_final_name,
    parse_staged_folder,
)
from ..checkpoints.manifest import FileSum
from ..checkpoints.verification import CheckpointDamaged, read_manifest
from ..errors import TrinityError
from ..system.open_folder import OpenFolder, parts_of

# Bytes; a mark holds one path.
_LONGEST_MARK = 4096


class CheckedFiles(NamedTuple):
    """Result of :meth:`SavedFiles.check`."""

    digests: int
    """Files, and lists of the digests of a folder, whose digest was compared."""
    sizes: int
    """Folders without a list of digests, whose bytes were compared."""
    gone: int
    """Saves whose folder is there no more; the reducer deletes old checkpoints."""
    mismatches: list[str]
    manifests: int = 0
    """Checkpoints whose files were compared with their manifest."""


class SavedFiles:
    """Saves of a log that finished, by the path to which they wrote."""

    def __init__(self) -> None:
        self._saves: dict[str, SaveFinished] = {}

    def add(self, envelope: Envelope) -> None:
        """Note a save; a later one at the same path takes the place of an earlier one."""
        event = envelope.event
        if isinstance(event, SaveFinished) and event.path is not None:
            self._saves[event.path] = event

    def check(self, folder: Path) -> CheckedFiles:
        """Compare the files that are there, below their staged or their final folder."""
        digests = sizes = gone = 0
        verified = check_manifests(folder)
        mismatches: list[str] = []
        with OpenFolder.open_run(folder) as run:
            places = dict(_places(run))
            for path, save in self._saves.items():
                staged = parse_staged_folder(path)
                place = path if staged is None else _moved(path, staged, places)
                if place is None:
                    gone += 1
                    continue
                wrong = _compare(run, place, save, verified.sums.get(place))
                if wrong is not None:
                    mismatches.append(wrong)
                digests += save.digest is not None
                sizes += save.digest is None
        shown = {mismatch.partition(" of step ")[0] for mismatch in mismatches}
        mismatches += [
            f"{error.path} of step {error.step} {error.reason}"
            for error in verified.damage
            if str(error.path) not in shown  # the log has said it
        ]
        return CheckedFiles(digests, sizes, gone, mismatches, verified.manifests)


class VerifiedManifests(NamedTuple):
    """Checkpoints of a run that were compared with their manifests."""

    manifests: int
    sums: dict[str, FileSum]
    """Files that are as listed, by their paths in the run's directory."""
    damage: list[CheckpointDamaged]
    """First difference of each checkpoint that has one."""


def check_manifests(run: Path) -> VerifiedManifests:
    """Compare the checkpoints of a run with their manifests."""
    count, sums, damage = 0, dict[str, FileSum](), list[CheckpointDamaged]()
    for folder in sorted(run.iterdir()):
        if parse_final_name(folder.name) is None or folder.is_symlink() or not folder.is_dir():
            continue
        # The folder may be removed or replaced while its files are read: a difference says nothing
        # then.
        inode = folder.stat().st_ino
        try:
            manifest = read_manifest(folder)
            if manifest is None:
                continue
            count += 1
            manifest.check_sizes()
            manifest.check_digests()
        except CheckpointDamaged as error:
            with suppress(FileNotFoundError):  # retention may have removed it meanwhile
                if folder.stat().st_ino == inode:
                    damage.append(error)
        else:
            files = manifest.files()
            sums |= {f"{folder.name}/{file.path.relative_to(folder)}": file.sum for file in files}
    return VerifiedManifests(count, sums, damage)


def _places(run: OpenFolder) -> Iterator[tuple[str, str]]:
    """Yield the staged folder of each checkpoint that is there, and its present folder."""
    for name in run.names():
        if parse_final_name(name) is not None and run.is_folder(name):
            with run.below(name) as final:
                mark = final.read(MADE_FROM, _LONGEST_MARK)
            if mark is not None:
                yield mark.decode(errors="replace"), name
    if run.is_folder(STAGING):
        with run.below(STAGING) as staging:
            for name in staging.names():
                yield f"{STAGING}/{name}", f"{STAGING}/{name}"


def _moved(path: str, staged: str, places: dict[str, str]) -> str | None:
    place = places.get(staged)
    return None if place is None else place + path.removeprefix(staged)


def _compare(
    run: OpenFolder, path: str, save: SaveFinished, verified: FileSum | None
) -> str | None:
    """Return the difference between a file and its save, in words; None without any.

    A file that was compared with its manifest is not read again.
    """
    shown = f"{run.path / path} of step {save.slot.step}"
    nbytes: int | None
    digest: str | None
    try:
        if verified is not None and save.digest is not None:
            nbytes, digest = verified.bytes, f"sha256:{verified.sha256}"
        else:
            nbytes, digest = _measure(run, path, save)
    except FileNotFoundError:
        return f"{shown} is not there, but its folder is"
    except (OSError, TrinityError) as error:
        return f"{shown} cannot be read: {error}"
    if nbytes != save.bytes:
        return f"{shown} has {nbytes} bytes, and {save.bytes} were saved"
    if digest != save.digest:
        return f"{shown} was changed: its digest is {digest}, and {save.digest} was saved"
    return None


def _measure(run: OpenFolder, path: str, save: SaveFinished) -> tuple[int, str | None]:
    """Return the bytes and the digest of what a save wrote, as the coordinator takes them.

    The digest of a single folder is that of its list of digests. No link is followed.
    """
    if save.files:
        measures = {
            name: measured
            for file in save.files
            for name, measured in _measure_all(run, path, file)
        }
        nbytes = sum(size for size, _ in measures.values())
        return nbytes, combine_digests({name: digest for name, (_, digest) in measures.items()})
    digested = save.digest is not None
    *folders, name = parts_of(path, run.path)
    with run.below(*folders) as folder:
        if not folder.is_folder(name):
            return _measure_file(folder, name, digested=digested)
        with folder.below(name) as saved:
            listed = _measure_file(saved, FILE_DIGESTS, digested=True)[1] if digested else None
            return sum(_sizes(saved)), listed


def _measure_all(run: OpenFolder, path: str, file: str) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield path, bytes and sha256 of each file of a save; the path is relative to the save's."""
    below = PurePosixPath(file)
    *folders, name = parts_of(str(PurePosixPath(path) / below), run.path)
    with run.below(*folders) as folder:
        if not folder.is_folder(name):
            yield str(below), _sha256_of(folder, name)
            return
        with folder.below(name) as saved:
            for at, subfolder, entry in _saved_files(saved):
                yield str(below.joinpath(*at, entry)), _sha256_of(subfolder, entry)


def _sha256_of(folder: OpenFolder, name: str) -> tuple[int, str]:
    nbytes, digest = _measure_file(folder, name, digested=True)
    return nbytes, (digest or "").removeprefix("sha256:")


def _measure_file(folder: OpenFolder, name: str, *, digested: bool) -> tuple[int, str | None]:
    # A link in the file's place may lead out of the folder, and a pipe would block.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=folder.descriptor), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if digested else None
        return os.fstat(file.fileno()).st_size, digest and f"sha256:{digest}"


def _sizes(folder: OpenFolder) -> Iterator[int]:
    for _, subfolder, name in _saved_files(folder):
        if (status := subfolder.stat(name)) is not None:
            yield status.st_size


def _saved_files(folder: OpenFolder) -> Iterator[tuple[Sequence[str], OpenFolder, str]]:
    """Yield the names on the way to each file that a save wrote, its folder and its name."""
    for at, subfolder in folder.walk():
        if MANIFEST_PARTS not in at:
            for name in subfolder.names():
                if subfolder.is_file(name) and name not in REDUCER_FILES:
                    yield at, subfolder, name
