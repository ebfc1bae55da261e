"""Mark in the folder that the reducer uses, so that a trainer detects that it writes elsewhere."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import msgspec
from msgspec import Struct

from ..checkpoints.layout import ITERATION_FILES, REDUCER_MARK
from ..core.state import ProcessHost
from ..system.host import get_host_id
from ..system.open_folder import OpenFolder

_LONGEST = 16_384
"""Bytes read of a mark."""


class RootMark(Struct, frozen=True, kw_only=True):
    """Content of the mark: one reducer's use of one folder."""

    token: int
    """Fencing token of the lead; the mark is valid while this is the leader's token."""
    mark: str
    """Random id, which identifies one folder under two paths."""
    host: str
    folder: str
    host_id: str | None = None
    """Identity of the reducer's host."""


def mark_folder(run: OpenFolder, token: int) -> bytes:
    """Mark a run's folder as the one that the leader uses; return the mark for the server.

    Raises OSError.
    """
    mark = RootMark(
        token=token,
        mark=secrets.token_hex(8),
        host=socket.gethostname(),
        folder=str(run.path),
        host_id=get_host_id(),
    )
    mark_bytes = msgspec.json.encode(mark)
    run.write(REDUCER_MARK, mark_bytes)
    return mark_bytes


def select_leader_folder(leader: bytes | None, mark_bytes: bytes | None) -> bytes | None:
    """Return a reducer's mark if that reducer leads; None otherwise."""
    try:
        mark = msgspec.json.decode(mark_bytes or b"", type=RootMark)
    except (msgspec.DecodeError, RecursionError):
        return None
    # The mark outlives its leader on the server; that of a former one says nothing.
    return mark_bytes if leader == str(mark.token).encode() else None


def parse_leader_host(description: bytes | None) -> ProcessHost | None:
    """Return the host of the reducer that leads, if its description of its folder names it."""
    if description is None:
        return None
    mark = msgspec.json.decode(description, type=RootMark)
    return None if mark.host_id is None else ProcessHost(node=mark.host, host_id=mark.host_id)


def other_folder(mark_bytes: bytes | None, folder: Path, run_id: str) -> str | None:
    """Return a warning with both paths if the reducer uses another folder; None otherwise."""
    if mark_bytes is None or _read(folder) == mark_bytes:
        return None
    mark = msgspec.json.decode(mark_bytes, type=RootMark)
    files = " and ".join(ITERATION_FILES.values())
    return (
        f"the reducer of run {run_id} uses the folder {mark.folder} on {mark.host}, and the "
        f"trainer writes checkpoints to {folder} on {socket.gethostname()}, which is another: they "
        f"get no final name, and {files} do not name them; give both the same --checkpoint-root"
    )


def _read(folder: Path) -> bytes | None:
    try:
        with OpenFolder.at(folder) as run:
            return run.read(REDUCER_MARK, _LONGEST)
    except OSError:
        return None
