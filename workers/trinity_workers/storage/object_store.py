"""Checkpoints on object storage, by fsspec: whole or invisible, as local ones are."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar, Literal

from trinity_events.checkpoints.layout import (
    ITERATION_FILES,
    MANIFEST,
    REDUCER_FILES,
    final_name,
    parse_final_name,
)
from trinity_events.checkpoints.manifest import (
    FileSum,
    ManifestUnreadable,
    is_sealed,
    parse_manifest,
)
from trinity_events.checkpoints.verification import read_manifest
from trinity_events.errors import StructuredError, TrinityError

from .durable_files import sync, sync_tree

SUMS = MANIFEST
"""Object of a checkpoint with the digest of each of its files, which sha256sum -c reads: its
manifest, or a plain list for a checkpoint of an earlier version. It is written last and removed
first: a checkpoint without it is not there."""
_PIECE = 8 << 20
"""Bytes of a file that are held at once."""
_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Protocols whose folders are parts of names. To make one would make a bucket that is missing."""
_OPTIONS: dict[str, dict[str, Any]] = {
    protocol: {"config_kwargs": {"retries": {"total_max_attempts": 3}}}
    for protocol in ("s3", "s3a")
}
"""Options of the protocols' libraries. s3fs tries again by itself, on top of these attempts."""


class ObjectStoreUnusable(TrinityError):
    """Checkpoints cannot be read from, or written to, object storage.

    Attributes:
        url: URL of the storage.
        what: Clause that says what failed.
        reason: First line of the error.
    """

    url: str
    what: str
    reason: str
    text = "{url} {what}: {reason}"


class CopyDamaged(ObjectStoreUnusable):
    """The copy of a checkpoint is not what was copied: another checkpoint may be."""


class _ObjectChanged(StructuredError, OSError):
    """An object is gone, or is not the file that was copied.

    Attributes:
        path: Path of the object.
        fault: ``gone``, or ``changed``.
    """

    path: str
    fault: Literal["gone", "changed"]
    texts: ClassVar = {
        "gone": "{path} is not there, and was copied",
        "changed": "{path} is not the file that was copied",
    }


class ObjectStore:
    """Checkpoints of runs below a URL, in the folders and with the names of local ones.

    Args:
        url: Such as ``s3://bucket/checkpoints``. Credentials come from the environment, as the
            library of the protocol reads them.

    Raises:
        ObjectStoreUnusable: if there is no such protocol, or its library is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self._url = url.rstrip("/")
        protocol = fsspec.core.split_protocol(self._url)[0]
        self._has_folders = protocol not in _BUCKETS
        with self._translating_errors("cannot be used"):
            self._files, root = fsspec.core.url_to_fs(self._url, **_OPTIONS.get(protocol, {}))
        self._root = PurePosixPath(root)

    def check(self) -> None:
        """Write an object, and remove it. Raises ObjectStoreUnusable if that fails."""
        probe = str(self._root / ".writable")
        with self._translating_errors("cannot be written to"):
            self._make(self._root)
            self._files.pipe_file(probe, b"")
            self._files.rm_file(probe)

    def upload(self, run: str, step: int, folder: Path) -> None:
        """Copy a step's folder; it is there once all of it is, and is then the newest.

        Raises:
            ObjectStoreUnusable: if the storage fails.
            CheckpointDamaged: if the folder lacks a file, or has one of another size.
        """
        target = self._folder(run, step)
        manifest = read_manifest(folder)
        if manifest is not None:
            manifest.check_sizes()
        with self._translating_errors(f"did not take the checkpoint of step {step} of run {run}"):
            # Files of an earlier attempt, or of a step that was trained again, must not mix in.
            self._remove(target)
            sums = []
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                name = file.relative_to(folder).as_posix()
                if name == MANIFEST:
                    continue
                digest = self._put(file, target / name)
                listed = None if manifest is None else manifest.sums.get(name)
                # The digest is of the bytes that were sent: what changed since its seal is not
                # copied.
                if listed is not None and listed.sha256 != digest:
                    raise OSError(f"{file} was changed since it was saved")
                sums.append(f"{digest}  {name}\n")
            data = "".join(sums).encode()
            if manifest is not None:
                data = (folder / MANIFEST).read_bytes()
            self._files.pipe_file(str(target / SUMS), data)
            # Last: the pointer names whole copies alone.
            self._files.pipe_file(str(self._pointer(run)), str(step).encode())

    def newest(self, run: str) -> int | None:
        """Return the step that was copied last; None if there is none that is whole."""
        with self._translating_errors("cannot be read"):
            # fsspec keeps listings, and another host may have written since.
            self._files.invalidate_cache()
            try:
                step = int(self._files.cat_file(str(self._pointer(run))))
            except FileNotFoundError:
                return None
            return step if self._is_whole(run, step) else None

    def steps(self, run: str) -> list[int]:
        """Return the steps of whole checkpoints, in order."""
        with self._translating_errors("cannot be read"):
            self._files.invalidate_cache()
            try:
                folders = self._files.ls(str(self._root / run), detail=False)
            except FileNotFoundError:
                return []
            steps = (parse_final_name(PurePosixPath(folder).name) for folder in folders)
            return sorted(step for step in steps if step is not None and self._is_whole(run, step))

    def prune(self, run: str, keep: int) -> None:
        """Remove all but the newest checkpoints up to the last one; ``keep`` 0 removes none."""
        newest = self.newest(run)
        if not keep or newest is None:
            return
        with self._translating_errors("cannot be written to"):
            up_to_newest = [step for step in self.steps(run) if step <= newest]
            for step in up_to_newest[:-keep]:
                self._remove(self._folder(run, step))

    def fetch(self, run: str, step: int, folder: Path) -> bool:
        """Copy a checkpoint into a local folder, verified; return False if it is not there.

        Raises ObjectStoreUnusable if the storage fails, and CopyDamaged if a file is not what was
        copied.
        """
        source = self._folder(run, step)
        unfinished = folder.with_name(f".{folder.name}.fetched")
        with self._translating_errors(f"did not give the checkpoint of step {step} of run {run}"):
            try:
                data = self._files.cat_file(str(source / SUMS))
            except FileNotFoundError:
                return False
            shutil.rmtree(unfinished, ignore_errors=True)
            has_manifest = is_sealed(data)
            for name, file in parse_manifest(data, sealed=has_manifest).items():
                self._get(source, name, unfinished, file)
            if has_manifest:
                self._get_marks(source, unfinished, data)
            sync_tree(unfinished)
            # After the sync: a folder with its final name counts as a checkpoint.
            unfinished.replace(folder)
            sync(folder.parent)
        return True

    def _put(self, file: Path, target: PurePosixPath) -> str:
        """Write a file as an object; return its digest."""
        self._make(target.parent)
        with file.open("rb") as source, self._files.open(str(target), "wb") as sink:
            digest = _copy(source, sink)
        if self._files.size(str(target)) != file.stat().st_size:
            raise OSError(f"{target} has not the size of {file}")
        return digest

    def _get_marks(self, source: PurePosixPath, folder: Path, manifest: bytes) -> None:
        """Copy the manifest, and the reducer's marks, which it does not list."""
        (folder / MANIFEST).write_bytes(manifest)
        for name in sorted(REDUCER_FILES - {MANIFEST}):
            if self._files.exists(str(source / name)):
                (folder / name).write_bytes(self._files.cat_file(str(source / name)))
        for name in REDUCER_FILES:
            if (folder / name).is_file():
                sync(folder / name)

    def _get(self, source: PurePosixPath, name: str, folder: Path, file: FileSum) -> None:
        target = folder / PurePosixPath(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not self._files.exists(str(source / name)):
            raise _ObjectChanged(str(source / name), "gone")
        with self._files.open(str(source / name), "rb") as stored, target.open("wb") as sink:
            # Of what was received, which covers both the storage and the way from it.
            digest = _copy(stored, sink)
            sink.flush()
            os.fsync(sink.fileno())
        if digest != file.sha256:
            raise _ObjectChanged(str(source / name), "changed")

    def _make(self, folder: PurePosixPath) -> None:
        if self._has_folders:
            self._files.makedirs(str(folder), exist_ok=True)

    def _remove(self, target: PurePosixPath) -> None:
        self._files.invalidate_cache()
        if self._files.exists(str(target / SUMS)):
            self._files.rm_file(str(target / SUMS))
        if self._files.exists(str(target)):
            self._files.rm(str(target), recursive=True)

    def _is_whole(self, run: str, step: int) -> bool:
        return bool(self._files.exists(str(self._folder(run, step) / SUMS)))

    def _folder(self, run: str, step: int) -> PurePosixPath:
        return self._root / run / final_name(step)

    def _pointer(self, run: str) -> PurePosixPath:
        return self._root / run / ITERATION_FILES["checkpoint"]

    @contextmanager
    def _translating_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the libraries' errors have no common class
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            is_damaged = isinstance(error, _ObjectChanged | ManifestUnreadable)
            kind = CopyDamaged if is_damaged else ObjectStoreUnusable
            raise kind(self._url, what, reason) from error


def _copy(source: IO[bytes], sink: IO[bytes] | Any) -> str:
    """Copy to the end; return the digest of what was copied."""
    digest = hashlib.sha256()
    while piece := source.read(_PIECE):
        digest.update(piece)
        sink.write(piece)
    return digest.hexdigest()
