"""Chunk stores of one process, by transport name."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import redis

from trinity_schemas import TransportName

from ...diagnostics.waits import WaitReporter
from ...errors import UnknownTransport
from .base import ChunkStore
from .collective import CollectiveStore
from .cuda import CudaStore
from .ray import RayStore
from .redis.store import RedisChunkStore
from .shared_memory.store import SharedMemoryStore


class Stores:
    """Chunk stores of one process; each one is opened at its first use.

    Args:
        run_id: The run.
        connect: Connects to the server of the chunks.
        process: Role and rank of the process.
        group_timeout: Seconds after which a silent peer of a collective group is an error.
        deadline: Seconds for which a server of the chunks that is away is waited for.
        waits: Returns the reporter of the process's long waits.
    """

    def __init__(
        self,
        run_id: str,
        connect: Callable[[], redis.Redis],
        process: str,
        group_timeout: float,
        deadline: float,
        waits: Callable[[], WaitReporter],
    ) -> None:
        self._waits = waits
        self._run_id = run_id
        self._connect = connect
        self._process = process
        self._group_timeout = group_timeout
        self._deadline = deadline
        self.opened: dict[str, ChunkStore] = {}

    def get(self, transport: str) -> ChunkStore:
        """Return the store of a transport. Raises VersionUnavailable for an unknown transport."""
        if transport not in self.opened:
            self.opened[transport] = self._open(transport)
        return self.opened[transport]

    def close(self) -> None:
        """Close all stores; the next use of a store opens it again."""
        # Taken first: after an error the next use opens new stores.
        opened, self.opened = self.opened, {}
        for store in opened.values():
            store.close()

    def _open(self, transport: str) -> ChunkStore:
        if transport == RedisChunkStore.name:
            client = self._connect()
            return RedisChunkStore(client, deadline=self._deadline, waits=self._waits)
        if transport == SharedMemoryStore.name:
            return SharedMemoryStore()
        if transport == RayStore.name:
            return RayStore()
        if transport == CollectiveStore.name:
            return CollectiveStore(
                self._connect(),
                self._run_id,
                self._process,
                timeout=self._group_timeout,
                waits=self._waits,
            )
        if transport == CudaStore.name:
            return CudaStore()
        raise UnknownTransport(transport=transport, transports=get_args(TransportName))
