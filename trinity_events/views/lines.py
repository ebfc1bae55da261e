"""Formatting of an event as one line."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    Envelope,
    Registration,
    ReissuedRollout,
    Slot,
    event_tag,
)

from ..core.fold_state import format_producer
from ..core.ordinal_ranges import compact_ranges
from ..log import position
from ..replay import Folded
from .times import format_time


def format_event(
    entry_id: str, envelope: Envelope, *, run_start: float | None = None, has_id: bool = True
) -> str:
    """Return the entry as a line: id, time, producer, event and fields."""
    at = position(entry_id)[0]
    when = format_time(at) if run_start is None else f"{at / 1000 - run_start:+9.3f}s"
    event = envelope.event
    mark = "»" if isinstance(event, ANNOUNCEMENT_TYPES) else " "
    who = format_producer(envelope.producer)
    details = " ".join(_format_fields(asdict(event)))
    line = f"{when} {mark} {who:<12} {event_tag(event):<23} {details}".rstrip()
    return f"{entry_id:<18} {line}" if has_id else line


def format_folded(
    folded: Folded, *, run_start: float | None = None, has_id: bool = True
) -> list[str]:
    """Return an entry and its announcements as lines."""
    if folded.envelope is None:
        return [f"{folded.entry.id:<18} undecodable"]
    return [
        format_event(folded.entry.id, envelope, run_start=run_start, has_id=has_id)
        for envelope in (folded.envelope, *folded.announcements)
    ]


_NAMED = 16
"""Elements of a field that are named; the others are counted."""
_LONGEST = 600
"""Maximum characters of a field; a run's configuration is longer, and is shown with --json."""
# Long, and of no use to a reader of lines: --json has them.
_LEFT_OUT = {"save_id", "caused_by", "saves", "parts", "registrations", "verified_at", "attempts"}


def _format_fields(fields: dict[str, Any]) -> list[str]:
    return [
        f"{name}={_cut(_format_value(value))}"
        for name, value in fields.items()
        if name not in _LEFT_OUT and value is not False and value not in (None, "", (), {})
    ]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def _format_more(value: tuple[Any, ...]) -> list[str]:
    return [f"+{len(value) - _NAMED}"] if len(value) > _NAMED else []


def _format_value(value: Any) -> str:  # noqa: PLR0911
    match value:
        case Slot():
            return f"{value.kind}/{value.step}/{value.role}-{value.rank}/{value.name}"
        case Registration():
            return f"{value.expected}x{value.kind}"
        case ReissuedRollout():
            return f"{value.ordinal}#{value.attempt}({value.reason})"
        # Before the other tuples: ranges of ordinals are tuples of tuples.
        case tuple() if value and all(isinstance(element, tuple) for element in value):
            return compact_ranges(value)  # ordinals
        case tuple() if any(isinstance(element, str | ReissuedRollout) for element in value):
            return ",".join(
                [_format_value(element) for element in value[:_NAMED]] + _format_more(value)
            )
        case float():
            return f"{value:.4g}"
        case dict():
            return ",".join(f"{key}:{_format_value(element)}" for key, element in value.items())
        case str() if ":" in value and " " not in value and len(value) > 32:
            return value[:16] + "…"  # a digest
        case str():
            return " ".join(value.split())  # keeps the event on one line
        case _ if hasattr(value, "epoch") and hasattr(value, "step"):
            return f"{value.epoch}/{value.step}"
        case _ if hasattr(value, "__struct_fields__"):
            return ",".join(
                f"{key}:{_format_value(element)}" for key, element in asdict(value).items()
            )
        case _:
            return str(value)
