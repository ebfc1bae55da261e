"""Pure core: the fold of a run's log, and what the reducer decides by it. No I/O, no clock."""

from .decisions.checkpoint_retention import Evidence, removable_steps
from .decisions.file_plan import FilePlan, InPlace, IterationFile, Promotion, SavedFile, plan_files
from .decisions.timeouts import LeaseHolder, Waiting, expired, lease_holders, overdue, waiting
from .fold import MONITOR, Monitor
from .state import MonitorState, ReadyPointer, decode_state, encode_state

__all__ = [
    "MONITOR",
    "Evidence",
    "FilePlan",
    "InPlace",
    "IterationFile",
    "LeaseHolder",
    "Monitor",
    "MonitorState",
    "Promotion",
    "ReadyPointer",
    "SavedFile",
    "Waiting",
    "decode_state",
    "encode_state",
    "expired",
    "lease_holders",
    "overdue",
    "plan_files",
    "removable_steps",
    "waiting",
]
