"""Reducer: folds a run's log, announces ready steps, and updates the checkpoint files."""

from .checkpoint_files import CheckpointFiles, UnsafePath, writable_root
from .leader import Leader
from .policy import ArchiveLimits, FoldLimits, InvalidPolicy, Policy, ReducerTimeouts
from .process import reduce_run, tune_process
from .reducer import Reducer
from .run_supervisor import reduce_all

__all__ = [
    "ArchiveLimits",
    "CheckpointFiles",
    "FoldLimits",
    "InvalidPolicy",
    "Leader",
    "Policy",
    "Reducer",
    "ReducerTimeouts",
    "UnsafePath",
    "reduce_all",
    "reduce_run",
    "tune_process",
    "writable_root",
]
