"""Payload stores of a run's processes, on the medium that its hosts share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trinity_events.rollouts.payloads import (
    PayloadReader,
    PayloadStore,
    RedisPayloadReader,
    RedisPayloads,
    SharedMemoryPayloadReader,
    SharedMemoryPayloads,
)
from trinity_events.server import WEIGHTS_SERVER, connect, open_client

from ..config.train_config import RunConfig


@asynccontextmanager
async def open_payloads(config: RunConfig) -> AsyncIterator[PayloadStore | None]:
    """Open the store of a run's payloads for the block; None if its answers stay in the stream.

    Shared memory is taken where the weights take it, as all processes are on one host then. Ranks
    that answer themselves have the tokens in the trainer's process anyway.
    """
    if config.trainer.colocated:
        yield None
    elif config.chunk_transport == "shm":
        yield SharedMemoryPayloads(config.run_id)
    else:
        async with connect(config.weights_url, setting=WEIGHTS_SERVER) as client:
            yield RedisPayloads(client, config.run_id)


def open_payload_reader(config: RunConfig) -> PayloadReader:
    """Return a reader of the payloads that :func:`open_payloads` stores."""
    if config.chunk_transport == "shm":
        return SharedMemoryPayloadReader(config.run_id)
    client = open_client(config.weights_url, setting=WEIGHTS_SERVER)
    return RedisPayloadReader(client, config.run_id, deadline=config.sync.timeout)
