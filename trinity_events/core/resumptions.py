"""Sentences on a resumed epoch: checkpoints that it passed over, and settings that changed."""

from __future__ import annotations

from trinity_schemas import SettingChange, SkippedCheckpoint

from ..system.error_text import shorten
from .state import MonitorState

_SHOWN = 16
"""Changed settings that are named; the event has all."""
_LONGEST_VALUE = 60
"""Characters of a value."""


def format_resumption(state: MonitorState) -> list[str]:
    """Return one sentence for each checkpoint that was passed over, and one for the settings."""
    return [
        *(f"{format_skipped(skipped)}." for skipped in state.skipped_checkpoints),
        *([f"{format_changes(state.changed_settings)}."] if state.changed_settings else []),
    ]


def format_skipped(skipped: SkippedCheckpoint) -> str:
    """Return why a checkpoint was passed over, without a full stop."""
    reason = skipped.reason.rstrip(".")
    return f"The resume passed over the checkpoint of step {skipped.step}: {reason}"


def format_changes(changes: list[SettingChange]) -> str:
    """Return the settings that changed at the resume, without a full stop."""
    named = [
        f"{change.name} from {_format_value(change.before)} to {_format_value(change.after)}"
        for change in changes[:_SHOWN]
    ]
    more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return f"The resume changed {', '.join(named)}{more}"


def _format_value(value: str | None) -> str:
    return "nothing" if value is None else shorten(value, _LONGEST_VALUE)
