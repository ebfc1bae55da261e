"""Checkpoint coordinator: runs a worker's saves and publishes their events."""

from ..log.publishing.heartbeat import LEASE, Heartbeat
from .coordinator import TURN_DEADLINE, CheckpointCoordinator, staged_path
from .free_space import DiskTooFull, PlannedSave
from .process_identity import this_process
from .save_attempt import SaveAttempt
from .timeouts import SaveTimeouts

__all__ = [
    "LEASE",
    "TURN_DEADLINE",
    "CheckpointCoordinator",
    "DiskTooFull",
    "Heartbeat",
    "PlannedSave",
    "SaveAttempt",
    "SaveTimeouts",
    "staged_path",
    "this_process",
]
