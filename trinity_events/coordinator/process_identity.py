"""Identity of this process, which no other process ever has."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from trinity_schemas import Process

from ..system.host import get_host_id

# Without /proc: two processes with one number do not import at the same nanosecond.
_IMPORTED_NS = time.time_ns()
# proc_pid_stat(5): field 22 of the line; number and name are the two before the list.
_STARTED_AFTER_NAME = 19
"""Index of the start time in ``/proc/PID/stat``, counted after the command's name."""


def this_process() -> Process:
    """Return the identity of this process, computed again because a fork has another one."""
    return Process(
        # Process numbers are used again, so that a number alone could name a dead process (decision
        # 10).
        host=socket.gethostname(),
        pid=os.getpid(),
        started=_started(),
        host_id=get_host_id(),
    )


def _started() -> int:
    """Return the start time in ticks since boot; the import time on a host without ``/proc``."""
    try:
        stat = Path("/proc/self/stat").read_text(errors="replace")
    except OSError:
        # macOS has no /proc.
        return _IMPORTED_NS
    # proc_pid_stat(5): the name is in parentheses, and may itself hold parentheses and spaces.
    return int(stat.rpartition(")")[2].split()[_STARTED_AFTER_NAME])
