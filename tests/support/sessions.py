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


def find_process(session: int, *words: bytes) -> int:
    """Return the process of a session whose command line contains one of these words.

    Raises:
        AssertionError: There is no such process, or more than one.
    """
    commands = {member: _read_command(member) for member in session_members(session)}
    matching = [
        member for member, command in commands.items() if any(word in command for word in words)
    ]
    assert len(matching) == 1, (words, matching, commands)
    return matching[0]


def _read_command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has ended since
        return b""


def kill_session(session: int) -> None:
    """Kill every process of a session at once."""
    for member in session_members(session):
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            continue
