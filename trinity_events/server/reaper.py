"""Reaper of an embedded server: stops it after its last user process was killed.

The last user process stops the server itself when it exits in order. The reaper acts for killed
ones. Like a user process it takes ``start.lock``, then tests if any process still holds
``users.lock``. It is a script that imports only the standard library, since it runs as long as
the server: ``python reaper.py FOLDER SOCKET PID``.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

LOOK = 1.0
"""Seconds between two checks for user processes and for the server."""
STOP = 20.0
"""Seconds that the server may take to end; no process can attach meanwhile."""


def watch(folder: Path, path: str, server: int) -> None:
    """Wait until the server has ended or has no user process; stop it in the second case."""
    # Opened once, so that a folder that is removed meanwhile does not come back.
    with (
        (folder / "users.lock").open("a+") as users,
        (folder / "start.lock").open("a") as deciding,
        (folder / "server.lock").open("a+") as lives,
    ):
        while _runs(server):
            # Without a deadline: it has no caller to report to (decision 5).
            fcntl.flock(deciding, fcntl.LOCK_EX)
            try:
                if unused(users):
                    # If its socket was removed, signal its process, as long as the number is its
                    # own: a server holds its lock until it ends.
                    if not _stop(path) and not unused(lives):
                        os.kill(server, signal.SIGTERM)
                    leave_no_folder(folder, Path(path))
                    return
            finally:
                # Before the start lock is free: a user that starts must not find this lock held.
                fcntl.flock(users, fcntl.LOCK_UN)
                fcntl.flock(deciding, fcntl.LOCK_UN)
            time.sleep(LOOK)


def unused(users: object) -> bool:
    """Take the users' lock; return False if another process holds it."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
    except BlockingIOError:
        return False
    return True


def leave_no_folder(data: Path, path: Path) -> None:
    """Remove the socket folder of an ended server, unless it is the data folder."""
    if path.parent != data:
        with suppress(OSError):  # a killed server leaves its socket
            path.parent.rmdir()


def _runs(server: int) -> bool:
    try:
        # A number that another process has by now only keeps the reaper waiting.
        os.kill(server, 0)
    except OSError:
        return False
    return True


def _stop(path: str) -> bool:
    """Ask the server to end; return False if no server listens on the socket."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(STOP)
            connection.connect(path)
            # An inline command, which needs no client library.
            connection.sendall(b"SHUTDOWN NOSAVE\r\n")
            connection.recv(64)  # returns once the server has ended
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:
        # A timeout: the server has the command, and hangs or is slow.
        pass
    return True


if __name__ == "__main__":
    # Detached like the server: it outlives its parent, which has no child to reap.
    if os.fork() == 0:
        os.setsid()
        watch(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    # Without the interpreter's cleanup, which both halves of the fork would run.
    os._exit(0)
