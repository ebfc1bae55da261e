"""Connections of one process to the servers of a run, each opened at its first use."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import cached_property

import redis

from ..log import Publisher, SyncEventLog, new_producer
from ..server import LOG_SERVER, WEIGHTS_SERVER, open_client, serving, serving_weights
from .settings import SynchronizerSettings
from .transports.base import ChunkStore
from .transports.collective import CollectiveStore
from .transports.stores import Stores


class Session:
    """Log publisher, chunk stores and collective group of one process, until they are closed.

    Args:
        settings: Run, servers, role and rank of the process.
    """

    def __init__(self, settings: SynchronizerSettings) -> None:
        self.settings = settings
        self.stores = Stores(
            settings.run_id,
            self._connect_weights,
            f"{settings.role}-{settings.rank}",
            settings.group_timeout,
            settings.deadline,
            lambda: self.events.waits,
        )
        self._servers = ExitStack()
        """Embedded servers in use."""
        self._publishers = ExitStack()

    @cached_property
    def events(self) -> Publisher:
        """Publisher of this process's events."""
        settings = self.settings
        log = SyncEventLog(open_client(self.log_url), settings.run_id)
        self._publishers.callback(log.close)
        producer = new_producer(settings.role, settings.rank)
        publisher = Publisher(log, settings.epoch, producer, deadline=settings.deadline)
        # After the log's, and so closed before it: it has events to write.
        self._publishers.callback(publisher.close)
        return publisher

    @property
    def store(self) -> ChunkStore:
        """Store of the versions that this process publishes."""
        return self.stores.get(self.settings.transport)

    @property
    def groups(self) -> CollectiveStore:
        """Store that forms collective groups, or joins them."""
        store = self.stores.get(CollectiveStore.name)
        assert isinstance(store, CollectiveStore)
        return store

    def close(self) -> None:
        """Close the connections. Raises PublishError when the log did not accept all events."""
        with self._servers, closing(self.stores), self._publishers:
            pass  # closed from the right: the publisher first, the servers last

    @cached_property
    def log_url(self) -> str:
        """URL of the log's server."""
        return self._servers.enter_context(serving(self.settings.redis_url))

    def _connect_weights(self) -> redis.Redis:
        """Connect to the server of the chunks."""
        log = self.log_url
        # Held until close(): an embedded server ends with its last user.
        url = self._servers.enter_context(serving_weights(self.settings.weights_url, log))
        return open_client(url, setting=LOG_SERVER if url == log else WEIGHTS_SERVER)
