"""The process that folds the log, announces what became true and keeps the files in step."""

from .checkpoints import CheckpointFiles, UnsafePath, writable_root
from .every_run import reduce_all
from .leader import LEASE, Leader
from .policy import InvalidPolicy, Policy
from .process import calm_interpreter, reduce_run
from .reduce import SNAPSHOT_EVERY, Reducer

__all__ = [
    "LEASE",
    "SNAPSHOT_EVERY",
    "CheckpointFiles",
    "InvalidPolicy",
    "Leader",
    "Policy",
    "Reducer",
    "UnsafePath",
    "calm_interpreter",
    "reduce_all",
    "reduce_run",
    "writable_root",
]
