"""Manifest of a checkpoint: the size and the sha256 of every file.

1. A saver digests what it wrote and lists it, durably, before it publishes that the save finished.
   Each save of a staged folder has a part of the manifest (:func:`write_part`).
2. The reducer joins the parts in one manifest before the folder gets its final name. Its mark has
   the manifest's digest.
3. An engine that saves without a run writes the whole manifest when all its ranks have written.
4. A manifest ends with the digest of its own lines, so that a manifest that was cut or changed is
   noticed where there is no mark.

The format is that of ``sha256sum``, whose ``-c`` checks a checkpoint by hand. It ignores comments,
which have the sizes and the seal.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from ..errors import TrinityError
from ..system.open_folder import OpenFolder
from .layout import (
    MADE_FROM,
    MANIFEST,
    MANIFEST_PARTS,
    SAVED_IN_PLACE,
    format_in_place,
    is_saved_file,
)

LONGEST_MANIFEST = 64 << 20
"""Bytes read of a manifest: those of half a million files."""
SAVER_THREADS = 4
"""Threads that digest the files of a save: training has the other cores."""

_HEADER = "# Files of a checkpoint. To check them: sha256sum -c SHA256SUMS"
_SEAL = "# sha256 of the lines above: "
_SIZE = re.compile(r"# (\d{1,18}) bytes")
# As sha256sum writes it: a backslash marks escapes, and an asterisk the binary mode.
_LINE = re.compile(r"(\\?)([0-9a-f]{64}) [ *](.+)")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}
"""Escapes of sha256sum, in lines that begin with a backslash."""


class ManifestUnreadable(TrinityError):
    """A manifest is not as it was written.

    Attributes:
        reason: What is wrong with it.
    """

    reason: str
    text = "{reason}"


class FileSum(NamedTuple):
    """Digest of a file, and its size."""

    sha256: str
    bytes: int | None
    """None in a list that sha256sum wrote."""


def format_manifest(sums: Mapping[str, FileSum]) -> bytes:
    """Format a manifest of files by their paths."""
    lines = [_HEADER]
    # Sorted, so that the same files always give the same manifest, whose digest is in the mark.
    for path, file in sorted(sums.items()):
        if file.bytes is not None:
            lines.append(f"# {file.bytes} bytes")
        escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        lines.append(f"{'' if escaped == path else chr(92)}{file.sha256}  {escaped}")
    text = ("\n".join(lines) + "\n").encode(errors="surrogateescape")
    return text + f"{_SEAL}{hashlib.sha256(text).hexdigest()}\n".encode()


def is_sealed(data: bytes) -> bool:
    """Return True if a list of digests is a manifest of this project: it has a seal to check."""
    return data.startswith(_HEADER.encode())


def parse_manifest(data: bytes, *, sealed: bool = True) -> dict[str, FileSum]:
    """Parse a manifest; return the files by their paths.

    Args:
        data: Content of the file.
        sealed: False to parse a list of sha256sum, which has neither sizes nor a seal.

    Raises:
        ManifestUnreadable: It was cut or changed, or names a path outside of its folder.
    """
    if sealed:
        _check_seal(data)
    sums: dict[str, FileSum] = {}
    size: int | None = None
    for line in data.decode(errors="surrogateescape").removesuffix("\n").split("\n"):
        if line.startswith("#"):
            match = _SIZE.fullmatch(line)
            size = int(match[1]) if match else None
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ManifestUnreadable(f"has a line that is no digest and path: {line[:80]!r}")
        path = match[3]
        if match[1]:
            path = re.sub(r"\\[\\nr]", lambda escape: _ESCAPES[escape[0]], path)
        parts = path.split("/")
        # A manifest from a foreign disk must not have files outside of its folder read.
        if any(part in ("", ".", "..") for part in parts) or "\0" in path:
            raise ManifestUnreadable(f"names {path!r}, which is not a path inside a checkpoint")
        if path in sums:
            raise ManifestUnreadable(f"names {path} twice")
        sums[path] = FileSum(match[2], size)
        # A size belongs to one path; a list of sha256sum has none.
        size = None
    return sums


def _check_seal(data: bytes) -> None:
    # From the end: a file name may contain the text of the seal.
    lines, marker, seal = data.rpartition(_SEAL.encode())
    if not is_sealed(data) or not marker:
        raise ManifestUnreadable("is cut or changed: it lacks its first or its last line")
    if seal.rstrip(b"\n") != hashlib.sha256(lines).hexdigest().encode():
        raise ManifestUnreadable("was changed: its lines have another digest than its last one")


def digest_opened(file: BinaryIO) -> FileSum:
    """Return the digest of an open file, and the bytes that were digested."""
    # hashlib releases the GIL while it digests, so threads share the work.
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    # Counted by the reads themselves: a size of stat() may be of another moment.
    return FileSum(digest, file.tell())


def digest_files(paths: Sequence[Path], *, threads: int | None = None) -> list[FileSum]:
    """Digest files, several at a time; by default as many as there are cores. Raises OSError."""
    if len(paths) < 2:  # a thread costs more than it saves
        return [_digest_file(path) for path in paths]
    # One file for a thread at a time: sha256 has no form that splits a file.
    with ThreadPoolExecutor(min(len(paths), threads or usable_cores())) as pool:
        return list(pool.map(_digest_file, paths))


def usable_cores() -> int:
    """Return the number of cores that this process may use: a digest takes all of one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _digest_file(path: Path) -> FileSum:
    with path.open("rb", buffering=0) as file:
        return digest_opened(file)


def saved_files(folder: Path) -> dict[str, int]:
    """Return the sizes of the files of saves below a folder, by their paths. Raises OSError.

    A link is none of them: its target is not part of the checkpoint.
    """
    sizes: dict[str, int] = {}
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if is_saved_file(PurePosixPath(name)):
            sizes[name] = path.stat().st_size
    return sizes


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    # By default os.walk leaves out what it cannot read, and the manifest would lack files.
    for above, _, names in os.walk(folder, onerror=fail):
        paths = (Path(above, name) for name in names)
        yield from (path for path in paths if path.is_file() and not path.is_symlink())


def write_manifest(folder: Path, sums: Mapping[str, FileSum]) -> None:
    """Write the manifest of a folder durably, complete or not at all."""
    with OpenFolder.at(folder) as opened:
        opened.write(MANIFEST, format_manifest(sums))


def listed_sums(folder: Path) -> dict[str, FileSum] | None:
    """Return what a folder's own manifest lists, if it lists the files that are there.

    The ranks that wrote a folder together have digested it together: their manifest spares another
    read of all files.
    """
    try:
        sums = parse_manifest((folder / MANIFEST).read_bytes())
    except (OSError, ManifestUnreadable):
        return None
    sizes = {path: file.bytes for path, file in sums.items()}
    # Files that were added or cut later make the list worthless.
    return sums if sizes == saved_files(folder) else None


def sums_below(paths: Iterable[Path], root: Path) -> dict[str, FileSum]:
    """Digest files, and those below folders; return them by their paths relative to the root.

    Raises OSError.
    """
    sums: dict[str, FileSum] = {}
    unlisted: list[Path] = []
    for path in paths:
        if not path.is_dir():
            unlisted.append(path)
            continue
        listed = listed_sums(path)
        if listed is None:
            unlisted += [path / name for name in saved_files(path)]
        else:
            place = path.relative_to(root)
            sums |= {(place / name).as_posix(): file for name, file in listed.items()}
    # All unlisted files in one call, so that small folders share the threads too.
    digests = digest_files(unlisted, threads=SAVER_THREADS)
    names = (path.relative_to(root).as_posix() for path in unlisted)
    return sums | dict(zip(names, digests, strict=True))


def mark_in_place(folder: Path, epoch: int, step: int) -> None:
    """Mark the final folder of a step, durably, as one that saves of the run were written to.

    A folder that the reducer made of a staged one stays as it is, such as that of the checkpoint
    that a run resumes from, whose weights it announces again.
    """
    with OpenFolder.at(folder) as final:
        if final.is_file(MADE_FROM):
            return
        final.write(SAVED_IN_PLACE, format_in_place(epoch, step).encode())
        final.sync()


def write_part(staged: Path, save: str, sums: Mapping[str, FileSum]) -> None:
    """Write the part of a save in a staged folder, durably; a later attempt replaces it.

    Args:
        staged: The staged folder.
        save: Identity of the save among those of the folder.
        sums: Files of the save, by their paths relative to the folder.
    """
    # Hashed, because a name of a save may have any length, and slashes.
    name = hashlib.sha256(save.encode(errors="surrogateescape")).hexdigest()[:32]
    with OpenFolder.at(staged) as folder, folder.below(MANIFEST_PARTS, create=True) as parts:
        parts.write(name, format_manifest(sums))
        # Durable before the event of the save (invariant 1).
        folder.sync()
