"""The pure core: what the log means. No I/O, no clock, no randomness."""

from .explain import explain
from .files import FilePlan, Promotion, plan_files
from .fold import MONITOR, Monitor
from .state import MonitorState, ReadyPointer, decode_state, encode_state
from .summary import RunSummary, Summarizer

__all__ = [
    "MONITOR",
    "FilePlan",
    "Monitor",
    "MonitorState",
    "Promotion",
    "ReadyPointer",
    "RunSummary",
    "Summarizer",
    "decode_state",
    "encode_state",
    "explain",
    "plan_files",
]
