"""Kills what is left of a local Ray whose driver has ended, however it ended.

Ray's agents look for their raylet every few seconds, and then wait for a server that is gone: they
outlive a driver that was killed by up to a minute. This is a script of its own, which imports the
standard library alone: ``python ray_reaper.py FOLDER PID``. Its standard input is its lifeline: it
ends with the driver. Ray names a session's folder by its driver's process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_SETTLED = 0.5
"""Seconds without a process of the session after which none is still being started."""
_DEADLINE = 30.0


def reap(folder: Path, driver: int) -> None:
    """Kill the processes of the driver's sessions until none is left."""
    give_up = time.monotonic() + _DEADLINE
    settled = time.monotonic() + _SETTLED
    while time.monotonic() < min(give_up, settled):
        left = processes_of(folder.glob(f"session_*_{driver}"))
        if left:
            settled = time.monotonic() + _SETTLED
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def processes_of(sessions: Iterable[Path]) -> list[int]:
    """Return the processes of these sessions; none where there is no /proc."""
    folders = [os.fsencode(one) for one in sessions]
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
            os.fsencode(one.readlink()).startswith(session + b"/")
            for one in (process / "fd").iterdir()
        )
    except OSError:  # it ended meanwhile, or belongs to another user
        return False


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(Path(sys.argv[1]), int(sys.argv[2]))
