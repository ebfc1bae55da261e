"""Sessions of processes: all that a command started, its Ray and its reducer too."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def session_members(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(path.parent.name))
    return members


def kill_session(session: int) -> None:
    """Kill every process of a session at once."""
    for member in session_members(session):
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            continue
