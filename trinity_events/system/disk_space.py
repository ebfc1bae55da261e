"""Free space of the disk that a path lies on."""

from __future__ import annotations

import shutil
from pathlib import Path


def get_free_disk_bytes(path: Path) -> int:
    """Return the free bytes where a path is, or would be made. Raises OSError."""
    return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
