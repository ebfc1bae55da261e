"""Folders and files of the home, which its user alone can access."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

FOLDER_MODE = 0o700
FILE_MODE = 0o600
UMASK = 0o077


def make_home(home: Path) -> None:
    """Create the home for its user alone; leave an existing home as it is."""
    home.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def make_private(folder: Path) -> None:
    """Create a folder of the home, and the home; remove other users' access to it."""
    make_home(folder.parent)
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    status = folder.stat()
    # A folder of an earlier version, or of another umask; one of another user is not ours to
    # change.
    if status.st_uid == os.getuid() and status.st_mode & UMASK:
        folder.chmod(FOLDER_MODE)


def open_private(path: Path, mode: str = "a+") -> IO[str]:
    """Open a file of the home, created for its user alone; do not follow a link."""
    return open(path, mode, opener=_opener)


def _opener(path: str, flags: int) -> int:
    # A link in a shared folder could have another file of the user written to.
    return os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)
