"""The stores that one process publishes to and pulls from, by the names that the log knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import redis

from ...errors import VersionUnavailable
from .base import ChunkStore
from .collective import CollectiveStore
from .cuda import CudaStore
from .ray import RayStore
from .redis.store import RedisChunkStore
from .shared_memory.store import SharedMemoryStore

TransportName = Literal["redis", "shm", "ray", "collective", "cuda"]


class Stores:
    """Each is opened when it is first asked for.

    Args:
        run_id: The run.
        connect: Makes a client to the server of the chunks.
        process: What the process is called among those of a collective group.
        group_timeout: Seconds within which a dead peer of a collective group is an error.
    """

    def __init__(
        self, run_id: str, connect: Callable[[], redis.Redis], process: str, group_timeout: float
    ) -> None:
        self._run_id = run_id
        self._connect = connect
        self._process = process
        self._group_timeout = group_timeout
        self.opened: dict[str, ChunkStore] = {}

    def of(self, transport: str) -> ChunkStore:
        """The store. Raises VersionUnavailable for a transport of a later version of ours."""
        if transport not in self.opened:
            self.opened[transport] = self._open(transport)
        return self.opened[transport]

    def close(self) -> None:
        """Close them; one that is asked for later is opened anew."""
        opened, self.opened = self.opened, {}
        for store in opened.values():
            store.close()

    def _open(self, transport: str) -> ChunkStore:
        if transport == RedisChunkStore.name:
            return RedisChunkStore(self._connect())
        if transport == SharedMemoryStore.name:
            return SharedMemoryStore()
        if transport == RayStore.name:
            return RayStore()
        if transport == CollectiveStore.name:
            return CollectiveStore(
                self._connect(), self._run_id, self._process, timeout=self._group_timeout
            )
        if transport == CudaStore.name:
            return CudaStore()
        raise VersionUnavailable(
            f"the version travels by {transport}, of which this version of trinity-events "
            f"knows nothing: it knows {', '.join(get_args(TransportName))}"
        )
