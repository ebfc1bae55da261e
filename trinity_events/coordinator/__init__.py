"""Checkpoint coordinator: runs a worker's saves and publishes their events."""

from .coordinator import FLUSH_DEADLINE, LEASE, TURN_DEADLINE, CheckpointCoordinator, staged_path
from .heartbeat import Heartbeat
from .process_identity import this_process
from .save_attempt import SaveAttempt

__all__ = [
    "FLUSH_DEADLINE",
    "LEASE",
    "TURN_DEADLINE",
    "CheckpointCoordinator",
    "Heartbeat",
    "SaveAttempt",
    "staged_path",
    "this_process",
]
