"""Index of runs: a stream, so that readers wait for new runs without polling."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import redis.asyncio

from trinity_schemas import RUN_INDEX, check_run_id

from ...errors import RunNotFound
from ..position import LATEST, ORIGIN, is_from_a_clock
from .key_errors import naming_wrong_type
from .scripts import Scripts

_FIELD = b"run"
_RENUMBERED = f"trinity:{{{RUN_INDEX}}}:renumbered"
"""Temporary key of the renumbering; its hash tag puts it on the cluster node of the index."""


async def add_run(client: redis.asyncio.Redis, run_id: str) -> None:
    """List a run; readers ignore a repeated listing."""
    async with naming_wrong_type(client, RUN_INDEX, "stream"):
        await client.xadd(RUN_INDEX, {_FIELD: check_run_id(run_id)})


async def list_runs(client: redis.asyncio.Redis) -> dict[str, float]:
    """Return every run of the server with the Unix time of its last opening, oldest first."""
    async with naming_wrong_type(client, RUN_INDEX, "stream"):
        reply: Any = await client.xrange(RUN_INDEX)
    runs: dict[str, float] = {}
    for entry_id, fields in reply:
        run_id = run_of_listing(fields)
        if run_id is not None:
            # Inserted again: the order is that of the last opening.
            runs.pop(run_id, None)
            runs[run_id] = int(entry_id.partition(b"-")[0]) / 1000
    return runs


async def require_run(
    client: redis.asyncio.Redis,
    run_id: str | None,
    way_out: str = "list them with: trinity-events runs",
) -> str:
    """Return the id of the run asked for, or of the newest run.

    Raises:
        RunNotFound: if the server has no such run; the error names the nearest one.
    """
    runs = await list_runs(client)
    if run_id is None:
        if not runs:
            raise RunNotFound(None, "empty")
        return list(runs)[-1]
    if run_id not in runs:
        newest = tuple(runs)[-5:]
        raise RunNotFound(run_id, "absent", nearest_name(run_id, runs), newest, way_out)
    return run_id


def nearest_name(name: str, candidates: Iterable[str]) -> str | None:
    """Return the known name most similar to a mistyped one; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(candidates), 1, 0.6)), None)


async def watch_runs(
    client: redis.asyncio.Redis, *, renumbering: bool = False
) -> AsyncIterator[str]:
    """Yield every listing of a run, old and new, repeats included.

    ``renumbering`` repairs the index if a listing has an id past year 9999. It needs the right
    to write to the index.
    """
    after = "0-0"
    connection: Any = client
    while True:
        async with naming_wrong_type(client, RUN_INDEX, "stream"):
            # Three seconds, below the deadline of a socket (`server/clients.py`).
            reply = await connection.xread({RUN_INDEX: after}, count=1000, block=3000)
        for _, listings in reply or ():
            for entry_id, fields in listings:
                if renumbering and not is_from_a_clock(entry_id.decode()):
                    await renumber_index(client)
                    # The ids from here on have changed: the next read begins after the last listing
                    # before.
                    break
                after = entry_id.decode()
                run_id = run_of_listing(fields)
                if run_id is not None:
                    yield run_id


async def renumber_index(client: redis.asyncio.Redis) -> None:
    """Give new ids to listings with ids past year 9999, so that runs can be listed again."""
    async with naming_wrong_type(client, RUN_INDEX, "stream"):
        keys = [RUN_INDEX, _RENUMBERED]
        await Scripts(client)("renumber", keys=keys, args=[f"{LATEST + 1}-0", ORIGIN, ""])


def run_of_listing(fields: dict[bytes, bytes] | None) -> str | None:
    """Return the run of an index entry; None if another program wrote the entry."""
    try:
        return check_run_id((fields or {})[_FIELD].decode())
    except (KeyError, ValueError):
        return None
