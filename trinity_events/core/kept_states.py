"""States kept at some entries of a log, so that every other state is a short fold away."""

from __future__ import annotations

import zlib

import msgspec
from msgspec import Struct

from .state import MonitorState, decode_state, encode_state

_LARGEST = 256 << 20
"""Maximum bytes of a decompressed state."""


class StateSpacing(Struct, frozen=True, kw_only=True):
    """Places of the kept states of one log.

    Attributes:
        every: Entries between two kept states of a log that is not very long.
        most: Maximum states kept of one log; a longer log keeps them further apart.
    """

    every: int = 5_000
    most: int = 256

    def interval(self, entries: int) -> int:
        """Return the entries between two kept states of a log of a length.

        It only ever doubles, so that states of a shorter log are at the right places of a longer
        one.
        """
        entries_between = self.every
        while entries // entries_between > self.most:
            entries_between *= 2
        return entries_between


class KeptState(Struct, frozen=True, kw_only=True):
    """State after an entry, with the identities of the log and of that entry.

    An identity has the id and the digest of an entry. A state counts for a log that begins with
    the same entry, and that has the same entry at the state's position.
    """

    log: str
    """Identity of the log's first entry."""
    entry: str
    """Identity of the entry after which the state is."""
    state: MonitorState


class _Encoded(Struct, frozen=True, array_like=True):
    log: str
    entry: str
    snapshot: bytes
    """Compressed snapshot, with the version of its layout."""


_decoder = msgspec.msgpack.Decoder(_Encoded)


def encode_kept(kept_state: KeptState) -> bytes:
    """Encode a kept state."""
    return msgspec.msgpack.encode(
        _Encoded(kept_state.log, kept_state.entry, compress_state(kept_state.state))
    )


def decode_kept(data: bytes) -> KeptState:
    """Decode a kept state. Raises msgspec.DecodeError, also for a state of another version."""
    record = _decoder.decode(data)
    return KeptState(log=record.log, entry=record.entry, state=inflate_state(record.snapshot))


def compress_state(state: MonitorState) -> bytes:
    """Compress the snapshot of a state."""
    return zlib.compress(encode_state(state), level=1)


def inflate_state(data: bytes) -> MonitorState:
    """Decode a compressed snapshot. Raises msgspec.DecodeError."""
    inflate = zlib.decompressobj()
    try:
        # Bounded: a small file may inflate to more than the memory.
        snapshot = inflate.decompress(data, _LARGEST)
    except zlib.error as error:
        raise msgspec.DecodeError(str(error)) from None
    if not inflate.eof:
        raise msgspec.DecodeError("the state was cut off, or is too large")
    return decode_state(snapshot)
