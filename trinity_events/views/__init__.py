"""Views of a run for users: text for terminals, and JSON. They only read what the core computed."""

from .as_json import fields_as_json, seconds, state_as_json, waits_as_json
from .lines import format_event, format_folded
from .status import format_run_hints, runs_table, status_panel

__all__ = [
    "fields_as_json",
    "format_event",
    "format_folded",
    "format_run_hints",
    "runs_table",
    "seconds",
    "state_as_json",
    "status_panel",
    "waits_as_json",
]
