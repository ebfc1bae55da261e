"""Peer from the field: FastStream's subscriber on a Redis stream, with the same payloads.

Usage: python -m benchmarks.faststream_peer URL STREAM COUNT [GROUP]; prints JSON: entries, seconds,
cpu.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import anyio
from faststream.redis import BinaryMessageFormatV1, RedisBroker, StreamSub

from trinity_schemas import decode_envelope

PAGE = 1000
FIELD = "__data__"
"""Field of a stream entry that FastStream reads."""


async def consume(url: str, stream: str, count: int, group: str | None) -> dict[str, float]:
    """Handle ``count`` entries, with the reducer's page size and without logging.

    The time begins with the first handled entry.
    """
    broker: Any = RedisBroker(url, logger=None)  # type: ignore[arg-type]
    done = anyio.Event()
    handled, began, cpu = 0, 0.0, 0.0
    figures: dict[str, float] = {}
    subscription = StreamSub(
        stream, group=group, consumer="one" if group else None, last_id="0", max_records=PAGE
    )

    async def handle(body: bytes) -> None:
        nonlocal handled, began, cpu
        decode_envelope(body)
        handled += 1
        if handled == 1:
            began, cpu = time.perf_counter(), time.process_time()
        if handled == count:
            figures.update(
                entries=count - 1,
                seconds=time.perf_counter() - began,
                cpu=time.process_time() - cpu,
            )
            done.set()

    broker.subscriber(stream=subscription)(handle)
    async with broker:
        await broker.start()
        with anyio.fail_after(300):
            await done.wait()
    return figures


def enveloped(payloads: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the payloads in the form of FastStream's publisher."""

    async def encode() -> list[bytes]:
        return [
            await BinaryMessageFormatV1.encode(
                message=payload, reply_to=None, headers=None, correlation_id=f"{number:036d}"
            )
            for number, payload in enumerate(payloads)
        ]

    yield from anyio.run(encode)


def main(url: str, stream: str, count: str, group: str | None = None) -> None:
    """Run the subscriber."""
    print(json.dumps(anyio.run(consume, url, stream, int(count), group)))


if __name__ == "__main__":
    main(*sys.argv[1:])
