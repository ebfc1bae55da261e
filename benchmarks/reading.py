"""Peer of the reducer: it reads the same entries with the same client, and only decodes them.

Usage: python -m benchmarks.reading URL RUN client|log; prints JSON: entries, seconds, cpu. With
``client`` it uses the client's ordinary interface. With ``log`` it reads and decodes as the reducer
does: it skips the client's dictionaries, and recognises known senders.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import anyio

from trinity_events.log import ORIGIN, RedisEventLog
from trinity_events.log.redis.replies import FIELD
from trinity_events.server import connect
from trinity_schemas import EnvelopeReader, RunKeys, decode_envelope

PAGE = 2000
"""Entries per read, as in the reducer."""


async def read_and_decode(url: str, run_id: str, how: str) -> dict[str, float]:
    """Read and decode all entries; the time begins after the first page, as for the reducer."""
    async with connect(url) as client:
        log, page = RedisEventLog(client, run_id), partial(_page_of_client, client, run_id)
        reader = EnvelopeReader()
        after, began, cpu, entries = ORIGIN, 0.0, 0.0, 0
        while True:
            if how == "client":
                page_of_entries = await page(after)
                for _, fields in page_of_entries:
                    decode_envelope(fields[FIELD])
            else:
                page_of_entries = await log.read(after, limit=PAGE)
                for entry in page_of_entries:
                    reader.decode(entry.payload)
            if not page_of_entries:
                break
            if after == ORIGIN:
                began, cpu = time.perf_counter(), time.process_time()
            else:
                entries += len(page_of_entries)
            last: Any = page_of_entries[-1][0]
            after = last if isinstance(last, str) else last.decode()
        return {
            "entries": entries,
            "seconds": time.perf_counter() - began,
            "cpu": time.process_time() - cpu,
        }


async def _page_of_client(client: Any, run_id: str, after: str) -> Any:
    return await client.xrange(RunKeys.of(run_id).events, min=f"({after}", count=PAGE)


if __name__ == "__main__":
    _, where, run, way = sys.argv
    print(json.dumps(anyio.run(read_and_decode, where, run, way)))
