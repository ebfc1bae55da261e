"""Views of a run for users: text for terminals, and JSON. They only read what the core computed."""

from .as_json import fields_as_json, seconds, state_as_json, waits_as_json
from .lines import event_line, folded_lines
from .status import runs_table, status_panel

__all__ = [
    "event_line",
    "fields_as_json",
    "folded_lines",
    "runs_table",
    "seconds",
    "state_as_json",
    "status_panel",
    "waits_as_json",
]
