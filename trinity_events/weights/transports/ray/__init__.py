"""Transport through Ray's object store."""

from .store import RayStore

__all__ = ["RayStore"]
