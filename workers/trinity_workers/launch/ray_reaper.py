"""Kills what is left of a local Ray whose driver has ended, however it ended, and its folder.

Ray's agents look for their raylet every few seconds, and then wait for a server that is gone: they
outlive a driver that was killed by up to a minute. This is a script of its own, which imports the
standard library alone: ``python ray_reaper.py FOLDER PID``. Its standard input is its lifeline: it
ends with the driver. Ray names a session's folder by its driver's process, and removes none.

1. A session is removed only if a driver of this project has marked it: other users of Ray have
   theirs in the same folder.
2. A driver holds a lock on its mark. A session whose mark can be locked has no driver any more.
3. A session with a process is not removed. Links are not followed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_SETTLED = 0.5
"""Seconds without a process of the session after which none is still being started."""
_DEADLINE = 30.0
_MARK = ".trinity-events"
"""File by which a driver marks its session."""


def mark_session(folder: Path, driver: int) -> int | None:
    """Mark a driver's session; return the descriptor that holds the lock on its mark.

    Names begin with a time, so that the last one is not of an earlier process with this id.
    """
    for session in sorted(folder.glob(f"session_*_{driver}"))[-1:]:
        if _is_own_folder(session):
            lock = os.open(session / _MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            return lock
    return None


def remove_sessions(folder: Path) -> None:
    """Remove the marked sessions of drivers that have ended, without a process."""
    for session in folder.glob("session_*_*"):
        if _is_own_folder(session) and _is_abandoned(session) and not processes_of([session]):
            shutil.rmtree(session, ignore_errors=True)
    latest = folder / "session_latest"
    with suppress(OSError):  # another run's Ray may replace it at this moment
        if latest.is_symlink() and not latest.exists():
            latest.unlink()


def _is_own_folder(session: Path) -> bool:
    """Return True for a folder of this user, and no link; anyone may write next to it."""
    with suppress(OSError):
        status = session.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return False


def _is_abandoned(session: Path) -> bool:
    """Return True if a session has a mark that no driver holds."""
    try:
        lock = os.open(session / _MARK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def reap(folder: Path, driver: int) -> None:
    """Kill the processes of the driver's sessions until none is left."""
    give_up = time.monotonic() + _DEADLINE
    settled = time.monotonic() + _SETTLED
    # Again and again: a process that is killed may have been about to start another one.
    while time.monotonic() < min(give_up, settled):
        processes = processes_of(folder.glob(f"session_*_{driver}"))
        if processes:
            settled = time.monotonic() + _SETTLED
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def processes_of(sessions: Iterable[Path]) -> list[int]:
    """Return the processes of these sessions; none where there is no /proc."""
    folders = [os.fsencode(session) for session in sessions]
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if any(_belongs(process, folder) for folder in folders)
    ]


def _belongs(process: Path, session: bytes) -> bool:
    """Return True for a process of Ray that names the session in an option, or logs into it.

    Ray's workers and agents change their command lines. What a user has open there is not killed.
    """
    try:
        command = (process / "cmdline").read_bytes()
        if b"=" + session in command:
            return True
        return command.startswith(b"ray::") and any(
            os.fsencode(descriptor.readlink()).startswith(session + b"/")
            for descriptor in (process / "fd").iterdir()
        )
    except OSError:  # it ended meanwhile, or belongs to another user
        return False


if __name__ == "__main__":
    # The kernel closes the driver's end of the pipe, however the driver ends.
    sys.stdin.buffer.read()
    reap(Path(sys.argv[1]), int(sys.argv[2]))
    remove_sessions(Path(sys.argv[1]))
