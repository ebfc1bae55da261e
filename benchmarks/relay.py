"""Two bare hops: entries of one stream are copied to another, without any other work.

Usage: python -m benchmarks.relay URL IN OUT; ends when standard input is closed.
"""

from __future__ import annotations

import sys
from typing import Any

import anyio

from trinity_events.cli.reducer import until_stopped
from trinity_events.server import connect


async def relay(url: str, source: str, target: str) -> None:
    """Copy entries with a blocking XREAD and an XADD, through the reducer's client."""
    async with connect(url, retry=False) as connected:
        client: Any = connected
        after = "0-0"
        while True:
            for _, entries in await client.xread({source: after}, block=1000) or ():
                for entry_id, fields in entries:
                    after = entry_id.decode()
                    await client.xadd(target, fields)


if __name__ == "__main__":
    anyio.run(until_stopped, lambda: relay(*sys.argv[1:4]), True)
