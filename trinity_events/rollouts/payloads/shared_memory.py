"""Payloads in shared memory, for processes of one user on one host.

A payload is a file in a folder that all runs of the user share and that stays: a run that removed
its own with its last payload could take it from under an explorer that is about to write.

The end of its lease is :data:`.ANSWER_LEASE` after the file's time of modification: all processes
of a host have one clock, and a write begins the lease by itself. Every process that uses the store
removes files whose lease has ended, of all runs of the user.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import anyio.to_thread

from trinity_schemas import PayloadAddress
from trinity_schemas.identity import check_run_id

from ...errors import SharedMemoryUnusable
from ...system.shared_memory import SHARED_MEMORY, available, make_private, owned
from .base import ANSWER_LEASE

_SWEEP_EVERY = 60.0
"""Seconds between two searches for ended leases: one lists all payloads on the host."""


def _users_folder(root: Path) -> Path:
    return root / f"trinity-payloads-{os.getuid()}"


def _file(root: Path, run_id: str, name: str) -> Path:
    return _users_folder(root) / f"{run_id}.{name}"


class SharedMemoryPayloads:
    """Implements :class:`.PayloadStore` with one file a payload.

    Args:
        run_id: The run.
        root: Mount point of the shared memory.
    """

    transport: Literal["redis", "shm"] = "shm"

    def __init__(self, run_id: str, root: Path = SHARED_MEMORY) -> None:
        self._root = root
        self._run_id = check_run_id(run_id)
        self._next_sweep = 0.0

    async def write(self, payloads: Mapping[str, bytes]) -> None:
        """Write payloads under their names, each with a lease of :data:`.ANSWER_LEASE`."""
        await anyio.to_thread.run_sync(self._write, payloads)

    async def renew(self, names: Sequence[str], seconds: float) -> set[str]:
        """Give payloads a lease of some seconds from now on; return the names of those there."""
        return await anyio.to_thread.run_sync(self._renew, names, seconds)

    async def free(self, names: Iterable[str]) -> None:
        """Delete payloads; names that are unknown change nothing."""
        await anyio.to_thread.run_sync(self._free, [*names])

    def _write(self, payloads: Mapping[str, bytes]) -> None:
        if not available(self._root):
            raise SharedMemoryUnusable("absent", self._root)
        make_private(_users_folder(self._root))
        self._sweep()
        for name, payload in payloads.items():
            path = _file(self._root, self._run_id, name)
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
            try:
                # Reserved first: a full file system is then an error before the copy.
                os.posix_fallocate(descriptor, 0, len(payload))
                remaining = memoryview(payload)
                while remaining:
                    remaining = remaining[os.write(descriptor, remaining) :]
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)

    def _renew(self, names: Sequence[str], seconds: float) -> set[str]:
        self._sweep()
        modified = time.time() + seconds - ANSWER_LEASE
        there = set()
        for name in names:
            with suppress(FileNotFoundError):
                path = _file(self._root, self._run_id, name)
                os.utime(path, (modified, modified), follow_symlinks=False)
                there.add(name)
        return there

    def _free(self, names: Sequence[str]) -> None:
        for name in names:
            _file(self._root, self._run_id, name).unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove files whose lease has ended, at most once a minute."""
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + _SWEEP_EVERY
        parent = _users_folder(self._root)
        if not owned(parent):  # another user's, or none
            return
        ended = time.time() - ANSWER_LEASE
        for path in parent.iterdir():
            # Another process may free it, or sweep it, at the same time.
            with suppress(FileNotFoundError):
                if path.lstat().st_mtime < ended:
                    path.unlink()


class SharedMemoryPayloadReader:
    """Implements :class:`.PayloadReader`.

    Args:
        run_id: The run.
        root: Mount point of the shared memory.
    """

    transport: Literal["redis", "shm"] = "shm"

    def __init__(self, run_id: str, root: Path = SHARED_MEMORY) -> None:
        self._root = root
        self._run_id = check_run_id(run_id)

    def read(self, addresses: Sequence[PayloadAddress]) -> Iterator[bytes | None]:
        """Yield the bytes of payloads in order, unchecked; None for one that is not there."""
        for address in addresses:
            yield self._read(address)

    def _read(self, address: PayloadAddress) -> bytes | None:
        if not owned(_users_folder(self._root)):
            return None
        path = _file(self._root, self._run_id, address.name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            # One byte more than the reference says: a longer file is then of another digest.
            return file.read(address.size + 1)
