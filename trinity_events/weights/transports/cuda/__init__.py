"""Through a GPU's memory that processes of one host share."""

from .memory import CudaMemory, DeviceMemory
from .store import CudaStore

__all__ = ["CudaMemory", "CudaStore", "DeviceMemory"]
