"""Pure core: fold of a run's log and queries of its state. No I/O, no clock, no randomness."""

from ..analysis.explain import explain, unfinished
from ..analysis.failures import Failure, failures
from ..analysis.summary import RunSummary, Summarizer
from .decisions.checkpoint_retention import Evidence, removable_steps
from .decisions.file_plan import FilePlan, IterationFile, Promotion, SavedFile, plan_files
from .decisions.timeouts import LeaseHolder, Waiting, expired, lease_holders, overdue, waiting
from .fold import MONITOR, Monitor
from .state import MonitorState, ReadyPointer, decode_state, encode_state

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
