"""Identity of the host of a process: of what can be seen of other processes from it.

A process id says something on the host that gave it alone, and the name of a host is no identity:
two hosts may have the same one, and containers of one kernel share its boot id
(``docs/decisions/0048-hosts.md``).
"""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
# The namespace: in another container the same number is another process.
_PROCESSES = Path("/proc/self/ns/pid")
_LENGTH = 16  # hexadecimal digits, 64 bits


def get_process_folder() -> Path:
    """Return the folder in which this user's processes of this host find one another.

    Raises OSError if it is another user's, or cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / f"trinity-stacks-{os.getuid()}"
    # Anyone may write to the temporary folder, so the owner is checked as well.
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's")
    return folder


def get_host_id() -> str:
    """Return the identity that processes share which can see each other.

    They have a kernel since its boot, a namespace of process ids, and a folder of
    :func:`get_process_folder` in common. Where one of these is unknown, no other process has the
    identity: then none is judged by what is seen here.
    """
    with suppress(OSError):
        folder = get_process_folder().stat()
        seen = f"{_BOOT.read_text()} {_PROCESSES.readlink()} {folder.st_dev} {folder.st_ino}"
        return sha256(seen.encode()).hexdigest()[:_LENGTH]
    # By process, so that a fork does not inherit the identity of its parent.
    return _draw_identity(os.getpid())


@lru_cache(maxsize=1)
def _draw_identity(_: int) -> str:
    """Return a random identity of one process."""
    return secrets.token_hex(_LENGTH // 2)
