"""Reason for the failed start of an embedded server, with the way out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from .binary import BINARY_VARIABLE, ServerBinary
from .data_format import APPEND_ONLY_FOLDER, read_format

_ROOM = 64 * 1024  # bytes that a server needs at least
_ELSEWHERE = "set TRINITY_HOME to another folder"
# "PID:ROLE DATE # TEXT": the sign # is the level of warnings in a log of Redis.
_LINE = re.compile(r"^\d+:\w \d+ \w+ \d{4} [\d:.]+ # (.+)$", re.MULTILINE)
_HARMLESS = ("oO0O", "WARNING", "Configuration loaded", "Server initialized", "Redis version")
_DAMAGED_FILE = re.compile(r"reading the append only file (\S+?):")
_DAMAGE = ("append only file", "Internal error in RDB", "AOF", "loading DB", "Wrong signature")


def explain_failure(binary: ServerBinary, folder: Path, log_text: str) -> str:
    """Return the reason for which a server did not start on a folder.

    Args:
        binary: The server.
        folder: The folder of its files.
        log_text: The part of its log since the start.
    """
    if shutil.disk_usage(folder).free < _ROOM:  # the server could not write its log
        return f"the disk of {folder} is full: make room, or set TRINITY_HOME to another"
    written = read_format(folder)
    if written is not None and not binary.reads(written):
        return (
            f"{folder} was written by {written}, which {binary.product} "
            f"{binary.version_text} cannot read: name that server or a newer one by "
            f"{BINARY_VARIABLE}, or {_ELSEWHERE}"
        )
    reason = _fatal_line(log_text)
    if reason is None:
        return f"see {folder}/redis.log"
    if any(sign in reason for sign in _DAMAGE):
        return _explain_damage(folder / APPEND_ONLY_FOLDER, reason)
    return f"{reason} (see {folder}/redis.log)"


def _fatal_line(log_text: str) -> str | None:
    """Return the last line of a log that reports an error."""
    lines = [line for line in _LINE.findall(log_text) if not line.startswith(_HARMLESS)]
    # The last one, since the server ends with the fatal error.
    return lines[-1] if lines else None


def _explain_damage(folder: Path, reason: str) -> str:
    what = f"its data is damaged ({reason.partition(': make a backup')[0]}): keep a copy of"
    match = _DAMAGED_FILE.search(reason)
    # redis-check-aof cuts off incremental files; a damaged base file cannot be mended.
    if match is None or not match[1].endswith(".incr.aof"):
        return f"{what} {folder} and put back an older copy, or {_ELSEWHERE}"
    return (
        f"{what} {folder}, then cut the file off at the damage, which loses what follows, with: "
        f"redis-check-aof --fix {folder / match[1]} (or valkey-check-aof); or {_ELSEWHERE}"
    )
