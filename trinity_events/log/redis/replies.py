"""Parsers of the server's replies with stream entries."""

from __future__ import annotations

from typing import Any

from ..base import Entry

FIELD = b"e"
"""Field of a stream entry that holds the event."""

# Bound once, as the constructor of a named tuple is a Python function: a call for each entry.
_new = tuple.__new__


def entries(reply: Any) -> list[Entry]:
    """Return entries from parsed replies; an entry without our field has empty bytes."""
    return [Entry(entry_id.decode(), (fields or {}).get(FIELD, b"")) for entry_id, fields in reply]


def flat_entries(reply: Any) -> list[Entry]:
    """Return entries from raw replies, which have a flat list of fields and values.

    The reducer spends much of its time here: hence no dict, and no call for each entry.
    """
    return [
        _new(Entry, (entry_id.decode(), fields[1] if fields[0] == FIELD else _payload(fields)))
        for entry_id, fields in reply
    ]


def _payload(fields: list[bytes]) -> bytes:
    return dict(zip(fields[::2], fields[1::2], strict=True)).get(FIELD, b"")
