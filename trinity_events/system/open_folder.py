"""Open folders: no name below them is followed as a link, and files are written atomically."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal

from ..errors import StructuredError
from .file_locks import try_lock

# Descriptors, not paths: a folder that is swapped for a link meanwhile is not followed.
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PART = ".part"
"""Suffix of unfinished files; their writer holds a lock on them as long as it lives."""


class UnsafePath(StructuredError, OSError):
    """A path leads out of its folder, or is none.

    Attributes:
        path: The path.
        fault: ``link`` if it is a link, ``invalid`` if it is no path, ``outside`` if it leads out.
        folder: The folder.
    """

    path: str
    fault: Literal["link", "invalid", "outside"]
    folder: Path | None = None
    texts: ClassVar = {
        "link": "{path} is a link, which is not followed: put the folder itself in its place, or "
        "remove the link",
        "invalid": "path {path!r} is no path and is not used",
        "outside": "path {path!r} leads out of {folder} and is not used",
    }


class OpenFolder:
    """Open folder; names are resolved relative to its descriptor, and no link is followed.

    Args:
        descriptor: The open folder.
        path: Path of the folder, for messages.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self.path = path

    @staticmethod
    @contextmanager
    def at(path: Path) -> Iterator[OpenFolder]:
        """Open a folder by its path; the user gave the path, so any part of it may be a link."""
        descriptor = os.open(path, _FOLDER)
        try:
            yield OpenFolder(descriptor, path)
        finally:
            os.close(descriptor)

    @staticmethod
    @contextmanager
    def open_run(path: Path, *, create: bool = False) -> Iterator[OpenFolder]:
        """Open a run's folder, which may not be a link; the checkpoint root above it may be one.

        Raises FileNotFoundError, and UnsafePath if the folder is a link.
        """
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
        with OpenFolder.at(path.parent) as root, root.below(path.name, create=create) as run:
            yield run

    @contextmanager
    def below(self, *names: str, create: bool = False) -> Iterator[OpenFolder]:
        """Open a folder below this one. Raises UnsafePath if any of the names is a link."""
        with ExitStack() as exits:
            folder = self
            for name in names:
                folder = folder._child(name, create)
                exits.callback(os.close, folder.descriptor)
            yield folder

    def _child(self, name: str, create: bool) -> OpenFolder:
        if create:
            # Another rank may make it at the same time.
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=self.descriptor)
        path = self.path / name
        try:
            return OpenFolder(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self.descriptor), path)
        except OSError as error:
            # Linux answers ENOTDIR for a link where a folder is asked for, others ELOOP.
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and self.is_link(name):
                raise UnsafePath(str(path), "link") from None
            raise

    def names(self) -> list[str]:
        """Return the names of the folder's entries."""
        with os.scandir(self.descriptor) as entries:
            return [entry.name for entry in entries]

    def stat(self, name: str) -> os.stat_result | None:
        """Return the status of an entry, a link as itself; None if it is absent."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def is_link(self, name: str) -> bool:
        """Return True if the entry is a link."""
        return (status := self.stat(name)) is not None and stat.S_ISLNK(status.st_mode)

    def is_folder(self, name: str) -> bool:
        """Return True if the entry is a folder, not a link."""
        return (status := self.stat(name)) is not None and stat.S_ISDIR(status.st_mode)

    def is_file(self, name: str) -> bool:
        """Return True if the entry is a file, not a link."""
        return (status := self.stat(name)) is not None and stat.S_ISREG(status.st_mode)

    def read(self, name: str, limit: int) -> bytes | None:
        """Return at most ``limit`` bytes of a file; None for anything else."""
        if not self.is_file(name):
            return None
        # Non-blocking: a pipe may have replaced the file just then.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, dir_fd=self.descriptor), "rb") as file:
            return file.read(limit)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file whole and durably; it replaces any entry of its name, even a link."""
        with self.part(name) as part:
            part.file.write(data)
            part.finish()

    def write_new(self, name: str, data: bytes) -> bool:
        """Write a new file as :meth:`write` does; return False if the name exists already."""
        with self.part(name) as part:
            part.file.write(data)
            try:
                part.finish(replace=False)
            except FileExistsError:
                return False
            return True

    @contextmanager
    def part(self, name: str) -> Iterator[Part]:
        """Create a file under a random name; :meth:`Part.finish` gives it ``name``.

        The end of the block removes the file unless it was finished.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

        def create(own: str) -> int:
            # Readable as the user's umask has it: checkpoints are shared in a group.
            return os.open(own, flags, 0o666, dir_fd=self.descriptor)

        with self._temporary(name, create) as (own, descriptor):
            part = Part(self, name, own, os.fdopen(descriptor, "wb", closefd=False))
            try:
                yield part
            finally:
                with suppress(OSError):  # flushing may fail; the data is discarded
                    part.file.close()

    @contextmanager
    def _temporary(self, name: str, create: Callable[[str], int]) -> Iterator[tuple[str, int]]:
        """Create and lock an entry of a random name; remove it at the end, unless it was renamed.

        A signal that ends the process leaves nothing behind, wherever it arrives: the name is known
        before the entry is created, and this folder may be closed before the entry is removed.
        """
        here = OpenFolder(os.dup(self.descriptor), self.path)
        own, descriptor = "", None
        try:
            while descriptor is None:
                own = f".{name}.{secrets.token_hex(8)}{_PART}"
                descriptor = create(own)
                # The lock shows a live writer; without it the sweep of another process removes the
                # file.
                if not (_claimed(descriptor) and here._is_at(descriptor, own)):
                    # Another process saw no writer yet, and removed it.
                    unusable, descriptor = descriptor, None
                    os.close(unusable)
            yield own, descriptor
        finally:
            try:
                here.remove(own)
            except BaseException as error:
                with suppress(OSError):  # again, since a signal may have interrupted it
                    here.remove(own)
                if not isinstance(error, OSError):
                    raise
            os.close(here.descriptor)
            if descriptor is not None:
                os.close(descriptor)

    def remove_abandoned(self, name: str, *, but: str | None = None) -> bool:
        """Remove unfinished files of dead writers; return True if a live writer has one.

        Args:
            name: Final name of the files.
            but: Unfinished file of this process, which stays.
        """
        of_name = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}{re.escape(_PART)}")
        parts = [entry for entry in self.names() if of_name.fullmatch(entry) and entry != but]
        written = [
            self._is_written(part) for part in parts
        ]  # a list: every abandoned file is removed
        return any(written)

    def _is_written(self, part: str) -> bool:
        """Remove an abandoned file; return True if its writer lives."""
        folder = self.is_folder(part)
        flags = _FOLDER if folder else os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(part, flags | os.O_NOFOLLOW, dir_fd=self.descriptor)
        except OSError:  # absent, or owned by another user
            return False
        try:
            if not try_lock(descriptor):
                return True
            if self._is_at(descriptor, part):
                self.remove(part)
        except OSError:  # no locks on this file system: the file stays
            return False
        finally:
            os.close(descriptor)
        return False

    def _is_at(self, descriptor: int, name: str) -> bool:
        status = self.stat(name)
        return status is not None and os.path.samestat(os.fstat(descriptor), status)

    def rename(self, name: str, folder: OpenFolder, new_name: str) -> None:
        """Move an entry, a link as itself."""
        os.rename(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=folder.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, a link, or a folder with all that is in it; no link is followed."""
        if self.is_folder(name):
            shutil.rmtree(name, dir_fd=self.descriptor)
        else:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.descriptor)

    def walk(self) -> Iterator[tuple[tuple[str, ...], OpenFolder]]:
        """Yield this folder and all folders below it, each with its relative path as names."""
        for path, _, _, descriptor in os.fwalk(".", dir_fd=self.descriptor, follow_symlinks=False):
            names = Path(path).parts
            yield names, OpenFolder(descriptor, self.path.joinpath(*names))

    def sync(self) -> None:
        """Make the names in the folder durable."""
        os.fsync(self.descriptor)


class Part:
    """Unfinished file, under a temporary name."""

    def __init__(self, folder: OpenFolder, name: str, own: str, file: BinaryIO) -> None:
        self._folder = folder
        self._name = name
        self.own = own
        """Temporary name."""
        self.file = file

    def finish(self, *, replace: bool = True) -> None:
        """Make the file durable and give it its final name.

        Args:
            replace: True to replace an entry of that name, False to raise FileExistsError.
        """
        self.file.flush()
        # Before the rename: after a crash the name must not stand for an empty file.
        os.fsync(self.file.fileno())
        of = self._folder.descriptor
        if replace:
            os.replace(self.own, self._name, src_dir_fd=of, dst_dir_fd=of)
        else:
            # link() refuses a name that exists, and rename() would replace it.
            os.link(self.own, self._name, src_dir_fd=of, dst_dir_fd=of, follow_symlinks=False)
            self._folder.remove(self.own)
        self.file.close()
        # The rename itself is durable only with its folder.
        self._folder.sync()


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Make a temporary folder beside ``target``, and remove it at the end of the block.

    The caller moves what is in it to ``target`` once that is complete. Removes first the temporary
    folders of killed writers.
    """
    with OpenFolder.at(target.parent) as parent:

        def create(own: str) -> int:
            os.mkdir(own, 0o700, dir_fd=parent.descriptor)
            return os.open(own, _FOLDER | os.O_NOFOLLOW, dir_fd=parent.descriptor)

        parent.remove_abandoned(target.name)
        with parent._temporary(target.name, create) as (own, _):
            yield target.parent / own


def _claimed(descriptor: int) -> bool:
    """Lock an unfinished file; return True if locked or if the file system has no locks."""
    try:
        return try_lock(descriptor)
    except OSError:
        return True


def parts_of(relative: str, folder: Path) -> list[str]:
    """Split a relative path into names. Raises UnsafePath if it may lead out of the folder."""
    if "\0" in relative:
        raise UnsafePath(relative, "invalid")
    # Paths come from events; an empty name would be an absolute path or a double slash.
    names = relative.split("/")
    if any(name in ("", ".", "..") for name in names):
        raise leads_out(relative, folder)
    return names


def leads_out(relative: str, folder: Path) -> UnsafePath:
    """Make the error for a path that leads out of a folder."""
    return UnsafePath(relative, "outside", folder)
