"""Transport through memory that the processes of one host share."""

from .segments import SHARED_MEMORY, available, free_bytes, sweep
from .store import SharedMemoryStore

__all__ = ["SHARED_MEMORY", "SharedMemoryStore", "available", "free_bytes", "sweep"]
