"""Format of an append-only file, and the server that wrote it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

APPEND_ONLY_FOLDER = "appendonlydir"
"""Name of the append-only file's folder in a server's folder."""
_HEADER_BYTES = 256  # the auxiliary fields with the version are the first ones of the file
# rdb.h: after the number comes an auxiliary field (fa), a database (fe) or the end (ff).
_MAGIC = re.compile(rb"(REDIS|VALKEY)(\d{3,4})(?=\xfa|\xfe|\xff)")
_WRITER = re.compile(rb"\xfa.(redis|valkey)-ver.(\d+(?:\.\d+)*)", re.DOTALL)
_READ_BY_ALL = 10
"""Newest format named REDIS that Redis 7.0 reads."""
_READ_SINCE_7_2 = 11
"""Newest format named REDIS that Redis 7.2 and every Valkey read."""


class DataFormat(NamedTuple):
    """Header of an append-only file's base file, which names the server that wrote it."""

    name: str
    number: int
    product: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        version = ".".join(map(str, self.version))
        return f"{self.product} {version} (format {self.name} {self.number})"

    def is_read_by(self, product: str, version: tuple[int, ...]) -> bool:
        """Return True if a server of this product and version is known to read the format.

        Redis and Valkey read the files of older versions of themselves. They share the formats
        up to that of Redis 7.2, from which Valkey was forked.
        """
        if self.name == "REDIS" and self.number <= _READ_BY_ALL:
            return True
        if self.name == "REDIS" and self.number <= _READ_SINCE_7_2:
            return version >= (7, 2)
        return product == self.product and version >= self.version


def read_format(folder: Path) -> DataFormat | None:
    """Return the format of the append-only file in a server's folder.

    Return None if the folder has no append-only file, or if its base file is damaged.
    """
    bases = list((folder / APPEND_ONLY_FOLDER).glob("appendonly.aof.*.base.rdb"))
    try:
        # While it rewrites, a server has two of them, and the newer one counts.
        with max(bases, key=_sequence).open("rb") as file:
            return _parse(file.read(_HEADER_BYTES))
    except (OSError, ValueError):
        return None


def _sequence(base: Path) -> int:
    """Return the sequence number of a base file; each rewrite makes the next one."""
    return int(base.name.split(".")[2])


def _parse(header: bytes) -> DataFormat | None:
    magic, writer = _MAGIC.match(header), _WRITER.search(header)
    if magic is None or writer is None:
        return None
    version = tuple(int(part) for part in writer[2].decode().split("."))
    return DataFormat(magic[1].decode(), int(magic[2]), writer[1].decode().title(), version)
