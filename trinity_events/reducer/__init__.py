"""Reducer: folds a run's log, announces ready steps, and updates the checkpoint files."""

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
