"""The pure core: what the log means. No I/O, no clock, no randomness."""

from .explain import explain, unfinished
from .failures import Failure, failures
from .files import FilePlan, IterationFile, Promotion, final_name, plan_files
from .fold import MONITOR, Monitor
from .overdue import Holder, Waiting, expired, holders, overdue, waiting
from .removal import removable
from .state import MonitorState, ReadyPointer, decode_state, encode_state
from .summary import RunSummary, Summarizer

__all__ = [
    "MONITOR",
    "Failure",
    "FilePlan",
    "Holder",
    "IterationFile",
    "Monitor",
    "MonitorState",
    "Promotion",
    "ReadyPointer",
    "RunSummary",
    "Summarizer",
    "Waiting",
    "decode_state",
    "encode_state",
    "expired",
    "explain",
    "failures",
    "final_name",
    "holders",
    "overdue",
    "plan_files",
    "removable",
    "unfinished",
    "waiting",
]
