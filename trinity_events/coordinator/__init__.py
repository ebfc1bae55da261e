"""The one face that workers and trainers use for saves."""

from .coordinator import FLUSH_DEADLINE, LEASE, TURN_DEADLINE, CheckpointCoordinator
from .heartbeat import Heartbeat
from .process_identity import this_process
from .save_attempt import SaveAttempt
from .staging import staged_path

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
