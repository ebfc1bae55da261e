"""The one face that workers and trainers use for saves."""

from .attempt import SaveAttempt
from .coordinator import FLUSH_DEADLINE, LEASE, TURN_DEADLINE, CheckpointCoordinator
from .heartbeat import Heartbeat
from .process import this_process
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
