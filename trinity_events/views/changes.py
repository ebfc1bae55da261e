"""Changes of a state as lines."""

from __future__ import annotations

import json
from typing import Any

from ..analysis.changes import Change

BOOKKEEPING = frozenset({"position", "entries", "sequences", "announced", "learning"})
"""Fields that change with every event or step; metrics by step are what `plot` is for."""
_LONGEST = 120
"""Maximum characters of a value in a line."""


def is_relevant(change: Change) -> bool:
    """Return True unless a change is of bookkeeping."""
    return change.path.partition(".")[0] not in BOOKKEEPING


def format_change(change: Change) -> str:
    """Return a change as a line: the path, the value before and the value after."""
    if change.before is None:
        return f"+ {change.path} = {_format_value(change.after)}"
    if change.after is None:
        return f"- {change.path} (was {_format_value(change.before)})"
    return f"~ {change.path}: {_format_value(change.before)} -> {_format_value(change.after)}"


def _format_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
