"""Files in shared memory that belong to a process for as long as it lives.

Below one folder of the user, every publishing process has a folder of its own with a lock that it
holds until it ends, however it ends: the kernel lets go of it then. Whoever gets the lock may
remove the folder.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shutil
import stat
import struct
import time
from contextlib import suppress
from pathlib import Path

from ....errors import SharedMemoryUnusable

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_LOCK = "owner"
_UNFINISHED = 60.0
"""Seconds after which a folder without a locked lock is no longer one that is being made."""
_LEAST = 1 << 20
# Of the kernel's locks on a part of an open file, which know nothing of those on the whole file.
_RANGE = struct.Struct("hhqqi")
# Linux puts all pages in place at once; elsewhere they come one by one.
_MAPPED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


def available(root: Path = SHARED_MEMORY) -> bool:
    """Whether this host has shared memory that can be used as files."""
    known = hasattr(os, "posix_fallocate") and hasattr(fcntl, "F_OFD_SETLK")
    return known and root.is_dir() and os.access(root, os.W_OK | os.X_OK)


def free_bytes(root: Path = SHARED_MEMORY) -> int:
    """How much of it is free."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def users_folder(root: Path = SHARED_MEMORY) -> Path:
    """This user's folder in it, whether or not it is there."""
    return root / f"trinity-weights-{os.getuid()}"


def sweep(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove what dead processes of this user left; returns their folders."""
    parent = users_folder(root)
    swept = [folder for folder in parent.iterdir() if _is_dead(folder)] if owned(parent) else []
    for folder in swept:
        shutil.rmtree(folder, ignore_errors=True)
    return swept


def owned(folder: Path) -> bool:
    """Whether the folder is there, and nobody but this user can have put anything into it."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _is_dead(folder: Path) -> bool:
    try:
        made = folder.stat().st_mtime
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # is being made, or was left half made; or is being removed
        with suppress(OSError):
            return time.time() - folder.stat().st_mtime > _UNFINISHED
        return False
    try:
        if folder.name.startswith(".") and time.time() - made < _UNFINISHED:
            return False  # its lock is about to be taken
        return locked(lock, fcntl.LOCK_EX)
    finally:
        os.close(lock)


def locked(descriptor: int, how: int) -> bool:
    """Take a lock if it is to be had now."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_beside(descriptor: int) -> None:
    """Hold a lease on a segment that somebody else is writing.

    It does not hinder the writer, but nobody begins anew in the segment as long as it is held.
    """
    _range_lock(descriptor, fcntl.F_RDLCK)


def end_beside(descriptor: int) -> None:
    """End that lease, whether or not it is held."""
    _range_lock(descriptor, fcntl.F_UNLCK)


def _is_read_beside(descriptor: int) -> bool:
    try:
        _range_lock(descriptor, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return True
    _range_lock(descriptor, fcntl.F_UNLCK)
    return False


def _range_lock(descriptor: int, how: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _RANGE.pack(how, os.SEEK_SET, 0, 1, 0))


class Owner:
    """The folder of this process's segments; its name begins with the process's id, for people."""

    def __init__(self, root: Path = SHARED_MEMORY) -> None:
        if not available(root):
            raise SharedMemoryUnusable(
                f"this host has no {root} that can be written: publish with --weights redis"
            )
        name = f"{os.getpid()}-{secrets.token_hex(6)}"
        parent = _made(users_folder(root))
        made = parent / f".{name}"
        made.mkdir(mode=0o700)
        # Locked before it has its name: nobody takes it for a dead process's.
        self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = made.rename(parent / name)

    def close(self) -> None:
        """Remove the folder. Those who read what was in it may read on."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _made(folder: Path) -> Path:
    """The user's folder, which nobody else may have made or may write to."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not owned(folder):
        raise SharedMemoryUnusable(
            f"{folder} is not this user's alone: remove it, or publish with --weights redis"
        )
    return folder


class Segment:
    """A file in shared memory that grows as it is written, and is written again and again.

    A new page costs several times the copy into it; one that was there before costs nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        self._size = 0
        self._memory = memoryview(b"")

    def take(self) -> bool:
        """Lock it for writing, if nobody reads it."""
        if not locked(self._descriptor, fcntl.LOCK_EX):
            return False
        if _is_read_beside(self._descriptor):
            self.give()
            return False
        return True

    def give(self) -> None:
        """Unlock it."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def rename(self, path: Path) -> None:
        """Give the file another name."""
        self.path = self.path.rename(path)

    def room(self, begin: int, nbytes: int) -> memoryview:
        """Memory from ``begin`` on, so much of it; less where what was there before ends."""
        if begin >= self._size:
            # By whole rooms: none is cut short where it has to grow next.
            self._grow(begin + _rounded(max(nbytes, self._step()), nbytes))
        return self._memory[begin : begin + nbytes]

    def memory(self, nbytes: int) -> memoryview:
        """Its memory, at least so much of it. Raises when the host has too little."""
        if nbytes > self._size:
            self._grow(_rounded(max(nbytes, self._size + self._step())))
        return self._memory

    def trim(self, nbytes: int) -> None:
        """Give back what is behind so many bytes, but for the rest of a MiB: to grow costs more."""
        size = _rounded(nbytes, _LEAST)
        if size < self._size:
            os.ftruncate(self._descriptor, size)
            self._size = size
            self._memory = self._memory[:size]

    def give_back(self, nbytes: int) -> None:
        """:meth:`trim`, unless somebody reads it along, who would fall off its end."""
        if not _is_read_beside(self._descriptor):
            self.trim(nbytes)

    def close(self) -> None:
        """Remove the file, and let go of it."""
        self.path.unlink(missing_ok=True)
        self._memory = memoryview(b"")
        os.close(self._descriptor)

    def _step(self) -> int:
        """By how much it grows at least."""
        return max(self._size // 4, _LEAST)

    def _grow(self, size: int) -> None:
        try:
            # Without it, the first touch of a page that the host does not have would kill us.
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                raise
            raise SharedMemoryUnusable(
                f"shared memory is full: {size} bytes for one weight version are more than is "
                f"free below {self.path.parent}; enlarge it (docker run --shm-size), "
                "or publish with --weights redis"
            ) from None
        self._memory = memoryview(mmap.mmap(self._descriptor, size, flags=_MAPPED))
        self._size = size


def _rounded(nbytes: int, unit: int = mmap.PAGESIZE) -> int:
    return -(-nbytes // unit) * unit
