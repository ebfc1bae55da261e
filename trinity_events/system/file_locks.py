"""File locks with a deadline; the error names the holding processes."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ..errors import StructuredError
from .error_text import shorten

LOCK_DEADLINE = 60.0
"""Longest wait for a lock, in seconds, by default; to start or stop a server takes at most half of
it."""
_LONGEST_PAUSE = 0.1  # seconds: short against the time that a server takes to start


def try_lock(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    """Take a lock if it is free; return True if taken. Raises OSError if locks are unsupported."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class LockHeld(StructuredError, OSError):
    """A lock was not free within its deadline.

    Attributes:
        path: File of the lock.
        deadline: Seconds that were waited.
        holders: Processes that hold it, as text.
    """

    path: Path
    deadline: float
    holders: str
    text = "the lock {path} was not free for {deadline:g} s: it is held by {holders}"


def lock(
    descriptor: int, path: Path, how: int = fcntl.LOCK_EX, deadline: float = LOCK_DEADLINE
) -> None:
    """Take a lock within a deadline. Raises LockHeld, naming the processes that hold it.

    Args:
        descriptor: The open file.
        path: The file's path, for the message.
        how: ``fcntl.LOCK_EX`` or ``fcntl.LOCK_SH``.
        deadline: Seconds to wait.
    """
    give_up = time.monotonic() + deadline
    pause = 0.002
    while not try_lock(descriptor, how):
        if time.monotonic() > give_up:
            raise LockHeld(path, deadline, _format_processes(holders(descriptor, how)))
        # flock has no timeout, and an alarm would need the main thread.
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def holders(descriptor: int, how: int = fcntl.LOCK_EX) -> list[int]:
    """Return the processes whose lock on an open file excludes a new one, from ``/proc/locks``.

    Args:
        descriptor: The open file.
        how: Wanted lock; only exclusive locks exclude a shared one.
    """
    status = os.fstat(descriptor)
    # As /proc/locks names a file: major and minor in hexadecimal, the inode in decimal.
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    # 1: FLOCK  ADVISORY  WRITE 1234 00:2b:5678 0 EOF; a waiting lock has "->" as second field.
    fields = [line.split() for line in lines]
    excluding = {"WRITE"} if how == fcntl.LOCK_SH else {"READ", "WRITE"}
    return [
        int(columns[4])
        for columns in fields
        if columns[1] == "FLOCK" and columns[5] == device and int(columns[4]) > 0
        if columns[3] in excluding
    ]


def _format_processes(processes: list[int]) -> str:
    """Describe processes with their commands."""
    if not processes:
        return "an unknown process"
    return ", ".join(f"process {process}{_format_command(process)}" for process in processes)


def _format_command(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    text = b" ".join(words).decode(errors="replace").strip()
    # A command line may hold escape sequences for the terminal.
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return f" ({shorten(shown, 100)})" if shown else ""
