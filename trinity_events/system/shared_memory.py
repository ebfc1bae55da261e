"""Files in shared memory that belong to a process for as long as it lives.

Every publishing process has its own folder below one folder of the user. It holds the folder's lock
until it ends: the kernel releases the lock even after a crash. A process that gets the lock may
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

from ..errors import SharedMemoryUnusable
from .file_locks import try_lock

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_LOCK = "owner"
_UNFINISHED = 60.0
"""Seconds after which a folder without a held lock no longer counts as being created."""
_LEAST = 1 << 20  # bytes by which a segment grows, and to which it is trimmed
# Range lock of an open file description, which is independent of locks on the whole file.
_RANGE = struct.Struct("hhqqi")
# Linux maps all pages at once; other systems map them one by one.
_MAPPED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


def available(root: Path = SHARED_MEMORY) -> bool:
    """Return True if this host has shared memory that can be used as files."""
    is_supported = hasattr(os, "posix_fallocate") and hasattr(fcntl, "F_OFD_SETLK")
    return is_supported and root.is_dir() and os.access(root, os.W_OK | os.X_OK)


def free_bytes(root: Path = SHARED_MEMORY) -> int:
    """Return the free bytes of shared memory."""
    status = os.statvfs(root)
    return status.f_bavail * status.f_frsize


def users_folder(root: Path = SHARED_MEMORY) -> Path:
    """Return the path of this user's folder, which may not exist."""
    return root / f"trinity-weights-{os.getuid()}"


def sweep(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the folders of this user's dead processes; return their paths."""
    parent = users_folder(root)
    # Another user's folder of this name is neither read nor swept.
    swept = [folder for folder in parent.iterdir() if _is_dead(folder)] if owned(parent) else []
    for folder in swept:
        shutil.rmtree(folder, ignore_errors=True)
    return swept


def owned(folder: Path) -> bool:
    """Return True if the folder exists and only this user can have written to it."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    )


def _is_dead(folder: Path) -> bool:
    try:
        made = folder.stat().st_mtime
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # it is being created or removed, or its creation was interrupted
        with suppress(OSError):
            return time.time() - folder.stat().st_mtime > _UNFINISHED
        return False
    try:
        if folder.name.startswith(".") and time.time() - made < _UNFINISHED:
            return False  # its lock is about to be taken
        # The kernel has released the lock of a dead process; a process id may be of another
        # container.
        return try_lock(lock)
    finally:
        os.close(lock)


def read_beside(descriptor: int) -> None:
    """Hold a lease on a segment that another process is writing.

    The writer continues, but no process rewrites the segment while the lease is held.
    """
    _range_lock(descriptor, fcntl.F_RDLCK)


def end_beside(descriptor: int) -> None:
    """End the lease of :func:`read_beside`, if it is held."""
    _range_lock(descriptor, fcntl.F_UNLCK)


def _is_read_beside(descriptor: int) -> bool:
    try:
        _range_lock(descriptor, fcntl.F_WRLCK)
    except OSError as error:
        # POSIX allows both for a lock that another holder has.
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return True
    _range_lock(descriptor, fcntl.F_UNLCK)
    return False


def _range_lock(descriptor: int, how: int) -> None:
    # The first byte stands for the file; the process id of such a lock must be 0 (fcntl(2)).
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _RANGE.pack(how, os.SEEK_SET, 0, 1, 0))


class Owner:
    """Folder of this process's segments; its name begins with the process id, for operators."""

    def __init__(self, root: Path = SHARED_MEMORY) -> None:
        if not available(root):
            raise SharedMemoryUnusable("absent", root)
        name = f"{os.getpid()}-{secrets.token_hex(6)}"
        parent = make_private(users_folder(root))
        made = parent / f".{name}"
        made.mkdir(mode=0o700)
        # Locked before it gets its name, so that no process takes it for a dead process's folder.
        self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The dot of the first name kept a sweep away until the lock was held.
        self.folder = made.rename(parent / name)

    def close(self) -> None:
        """Remove the folder. Readers with open segments can continue to read."""
        shutil.rmtree(self.folder, ignore_errors=True)
        # Last: while the lock is held no sweep touches the folder.
        os.close(self._lock)


def make_private(folder: Path) -> Path:
    """Make a folder if it is missing, and return it; no other user has write access to it.

    Raises:
        SharedMemoryUnusable: It is another user's.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not owned(folder):
        raise SharedMemoryUnusable("foreign", folder)
    return folder


class Segment:
    """File in shared memory that grows as it is written, and is reused.

    A new page costs several times the copy into it; a reused page costs nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        self._size = 0
        self._memory = memoryview(b"")

    def take(self) -> bool:
        """Lock the segment for writing; return False if it has readers."""
        if not try_lock(self._descriptor):
            return False
        if _is_read_beside(self._descriptor):
            self.give()
            return False
        return True

    def give(self) -> None:
        """Unlock the segment."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def rename(self, path: Path) -> None:
        """Rename the file."""
        self.path = self.path.rename(path)

    def room(self, begin: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of memory from ``begin`` on, or less where present memory ends."""
        if begin >= self._size:
            # It grows by whole buffers, so that the next growth cuts none short.
            self._grow(begin + _rounded(max(nbytes, self._step()), nbytes))
        return self._memory[begin : begin + nbytes]

    def memory(self, nbytes: int) -> memoryview:
        """Return at least ``nbytes`` of its memory. Raises if the host has too little."""
        if nbytes > self._size:
            self._grow(_rounded(max(nbytes, self._size + self._step())))
        return self._memory

    def trim(self, nbytes: int) -> None:
        """Release the memory behind ``nbytes``, up to the next MiB: growing again costs more."""
        size = _rounded(nbytes, _LEAST)
        if size < self._size:
            os.ftruncate(self._descriptor, size)
            self._size = size
            self._memory = self._memory[:size]

    def give_back(self, nbytes: int) -> None:
        """Call :meth:`trim`, unless a prefetching reader would read past the new end."""
        if not _is_read_beside(self._descriptor):
            self.trim(nbytes)

    def close(self) -> None:
        """Remove the file and close it."""
        # Readers keep the pages that they have mapped.
        self.path.unlink(missing_ok=True)
        self._memory = memoryview(b"")
        os.close(self._descriptor)

    def _step(self) -> int:
        """Return the minimum bytes by which it grows."""
        # By a quarter: a linear step would map a large part many times.
        return max(self._size // 4, _LEAST)

    def _grow(self, size: int) -> None:
        try:
            # Without the allocation, the first touch of an unavailable page kills the process
            # (SIGBUS).
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                raise
            raise SharedMemoryUnusable("full", self.path.parent, size) from None
        self._memory = memoryview(mmap.mmap(self._descriptor, size, flags=_MAPPED))
        self._size = size


def _rounded(nbytes: int, unit: int = mmap.PAGESIZE) -> int:
    return -(-nbytes // unit) * unit
