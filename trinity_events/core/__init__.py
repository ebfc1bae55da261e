"""Pure core: fold of a run's log and queries of its state. No I/O, no clock, no randomness."""

from .checkpoint_retention import Evidence, removable_steps
from .explain import explain, unfinished
from .failures import Failure, failures
from .file_plan import FilePlan, IterationFile, Promotion, SavedFile, plan_files
from .fold import MONITOR, Monitor
from .state import MonitorState, ReadyPointer, decode_state, encode_state
from .summary import RunSummary, Summarizer
from .timeouts import LeaseHolder, Waiting, expired, lease_holders, overdue, waiting

__all__ = [
    "MONITOR",
    "Evidence",
    "Failure",
    "FilePlan",
    "IterationFile",
    "LeaseHolder",
    "Monitor",
    "MonitorState",
    "Promotion",
    "ReadyPointer",
    "RunSummary",
    "SavedFile",
    "Summarizer",
    "Waiting",
    "decode_state",
    "encode_state",
    "expired",
    "explain",
    "failures",
    "lease_holders",
    "overdue",
    "plan_files",
    "removable_steps",
    "unfinished",
    "waiting",
]
