"""What people see: text for terminals. Views only read what the core computed."""

from .lines import event_line
from .status import runs_table, status_panel

__all__ = ["event_line", "runs_table", "status_panel"]
