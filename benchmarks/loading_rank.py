"""Rank of a trainer that loads the tokens of its groups, and makes a batch of them.

Usage: python -m benchmarks.loading_rank URL; ends with standard input. It reads requests from
there, and answers each on standard output once it has the batch.
"""

from __future__ import annotations

import struct
import sys
import time
from typing import IO

import msgspec
from msgspec import Struct

from trinity_events.rollouts.payloads import (
    PayloadReader,
    RedisPayloadReader,
    SharedMemoryPayloadReader,
    load_groups,
)
from trinity_events.server import open_client
from trinity_workers.algorithms.collate import collate
from trinity_workers.worker_group.wire import _PackedGroups, unpack

LENGTH = struct.Struct("<Q")
_DEADLINE = 60.0


class LoadRequest(Struct):
    """Groups that a rank is to load, as they travel to ranks."""

    run_id: str
    medium: str
    payload: bytes
    by_reference: list[bool]


class Loaded(Struct):
    """Answer of a rank."""

    tokens: int
    """Tokens of the samples that it loaded."""
    load: float
    """Seconds until it had the samples."""
    collate: float
    """Seconds in which they became a batch."""


def serve(url: str, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until their stream ends."""
    client = open_client(url)
    readers: dict[tuple[str, str], PayloadReader] = {}
    answer(answers, Loaded(0, 0.0, 0.0))  # it has imported what it needs
    while header := requests.read(LENGTH.size):
        request = msgspec.msgpack.decode(requests.read(*LENGTH.unpack(header)), type=LoadRequest)
        began = time.perf_counter()
        key = request.medium, request.run_id
        if key not in readers:
            readers = {key: open_reader(client, request.run_id, request.medium)}
        groups = unpack(_PackedGroups(request.payload, request.by_reference))
        samples = load_groups(readers[key], groups)
        loaded = time.perf_counter()
        batch = collate(samples, 0) if samples else None
        ended = time.perf_counter()
        tokens = int(batch.attention_mask.sum()) if batch is not None else 0
        del groups, samples, batch
        answer(answers, Loaded(tokens, loaded - began, ended - loaded))


def open_reader(client: object, run_id: str, medium: str) -> PayloadReader:
    """Return a reader of payloads on a medium; samples in the stream need none."""
    if medium == "shm":
        return SharedMemoryPayloadReader(run_id)
    return RedisPayloadReader(client, run_id, deadline=_DEADLINE)


def answer(answers: IO[bytes], loaded: Loaded) -> None:
    """Write an answer."""
    encoded = msgspec.msgpack.encode(loaded)
    answers.write(LENGTH.pack(len(encoded)) + encoded)
    answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin.buffer, sys.stdout.buffer)
