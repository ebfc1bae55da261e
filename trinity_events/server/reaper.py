"""Stops an embedded server that nobody uses any more, because its users were killed.

A script of its own, which imports nothing but the standard library, so that it costs little while
the server runs: ``python reaper.py FOLDER SOCKET PID``. Who leaves in order stops the server
itself; this is for those who could not. What is asked is what they ask: whether anybody still
holds the lock of the users, under the lock of those who decide.
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
"""Seconds after which it is looked whether anybody is there, or the server has gone."""
STOP = 20.0
"""Seconds that the server is given to end; nobody is let in meanwhile."""


def keep(folder: Path, path: str, server: int) -> None:
    """Wait until the server has gone, or nobody uses it: then stop it."""
    # Opened once: a folder that is removed meanwhile is not to come back.
    with (
        (folder / "users.lock").open("a+") as users,
        (folder / "start.lock").open("a") as deciding,
        (folder / "server.lock").open("a+") as lives,
    ):
        while _runs(server):
            fcntl.flock(deciding, fcntl.LOCK_EX)
            try:
                if unused(users):
                    # Without its socket, which somebody has removed, it is told by its number,
                    # as long as that is its own: a server holds its lock until it has gone.
                    if not _stop(path) and not unused(lives):
                        os.kill(server, signal.SIGTERM)
                    leave_no_folder(folder, Path(path))
                    return
            finally:
                fcntl.flock(users, fcntl.LOCK_UN)
                fcntl.flock(deciding, fcntl.LOCK_UN)
            time.sleep(LOOK)


def unused(users: object) -> bool:
    """Whether nobody else holds the users' lock, which is taken then."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
    except BlockingIOError:
        return False
    return True


def leave_no_folder(data: Path, path: Path) -> None:
    """Remove the folder of a socket that is not with the data of the server, which has ended."""
    if path.parent != data:
        with suppress(OSError):  # a server that was killed has left its socket
            path.parent.rmdir()


def _runs(server: int) -> bool:
    try:
        os.kill(server, 0)
    except OSError:
        return False
    return True


def _stop(path: str) -> bool:
    """Ask it to end; false when nothing listens there."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(STOP)
            connection.connect(path)
            connection.sendall(b"SHUTDOWN NOSAVE\r\n")
            connection.recv(64)  # its end, by which it has gone
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:
        pass
    return True


if __name__ == "__main__":
    # Detached as the server is: it outlives who starts it, and leaves nobody a child to reap.
    if os.fork() == 0:
        os.setsid()
        keep(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    os._exit(0)
