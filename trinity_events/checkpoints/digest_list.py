"""List of the digests of a Hugging Face folder's files, in the form of ``xxhsum -H128``.

The base install has no xxhash: it is imported where a file is digested.
"""

from __future__ import annotations

from pathlib import Path

from .layout import FILE_DIGESTS

_PIECE = 1 << 20
"""Bytes read and digested at a time: they fit in a core's cache, and a mapped file would count as
memory."""


def digested_files(folder: Path) -> list[Path]:
    """Return the files of a folder that its list of digests has, by name."""
    return [
        path
        for path in sorted(folder.iterdir())
        # Files that are being written, and marks of the reducer, have hidden names.
        if path.is_file() and path.name != FILE_DIGESTS and not path.name.startswith(".")
    ]


def digest_file(path: Path) -> str:
    """Return the XXH3 digest of a file, 128 bits in hexadecimal."""
    import xxhash

    # XXH3 finds accidents at the speed of memory; it is no protection against forgery (decision 7).
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_PIECE):
            digest.update(data)
    return digest.hexdigest()


def list_digests(folder: Path) -> bytes:
    """Digest the files of a folder, and return their list."""
    lines = (f"{digest_file(path)}  {path.name}\n" for path in digested_files(folder))
    return "".join(lines).encode()


def parse_digests(listed: str) -> dict[str, str]:
    """Return the digests of a list by file name, unchecked: a malformed line has an empty name."""
    lines = (line.partition("  ") for line in listed.splitlines())
    # Unchecked on purpose: the reader compares the digest of the whole list with the announced one.
    return {name: digest for digest, _, name in lines}
