"""Which process this is, so that no other can be taken for it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from trinity_schemas import Process

_IMPORTED_NS = time.time_ns()
_STARTED_AFTER_NAME = 19
"""Place of the start time in ``/proc/PID/stat``, counted from behind the command's name."""


def this_process() -> Process:
    """This process. Asked anew each time, since a fork is another one."""
    return Process(host=socket.gethostname(), pid=os.getpid(), started=_started())


def _started() -> int:
    """When it started, in ticks since the host booted; without ``/proc``, when it imported us."""
    try:
        stat = Path("/proc/self/stat").read_text(errors="replace")
    except OSError:
        return _IMPORTED_NS
    # The name is in parentheses and may hold any character, parentheses and spaces too.
    return int(stat.rpartition(")")[2].split()[_STARTED_AFTER_NAME])
