"""The process that folds the log, announces what became true and keeps the files in step."""

from .checkpoint_files import CheckpointFiles, UnsafePath, writable_root
from .leader import LEASE, Leader
from .policy import InvalidPolicy, Policy
from .process import reduce_run, tune_process
from .reducer import SNAPSHOT_EVERY, Reducer
from .run_supervisor import reduce_all

__all__ = [
    "LEASE",
    "SNAPSHOT_EVERY",
    "CheckpointFiles",
    "InvalidPolicy",
    "Leader",
    "Policy",
    "Reducer",
    "UnsafePath",
    "reduce_all",
    "reduce_run",
    "tune_process",
    "writable_root",
]
