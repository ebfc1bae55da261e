"""Deletion of a run from a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import redis.asyncio

from trinity_schemas import RUN_INDEX, RunKeys

from ...errors import TrinityError
from .key_errors import naming_wrong_type
from .run_index import run_of_listing
from .scripts import Scripts

_AT_ONCE = 1000
"""Keys that one request looks at."""


class RunInUse(TrinityError):
    """The run goes on, or a reducer leads it.

    Attributes:
        run_id: The run.
        fault: Why it stays.
        after: Last event that the caller knew.
        folder: Folder that belongs to another log.
        mark: The other log.
    """

    run_id: str
    fault: Literal["led", "published", "open", "folder"]
    after: str = ""
    folder: Path | None = None
    mark: str = ""
    texts: ClassVar = {
        "led": "a reducer leads run {run_id}: stop it, or wait until it has archived the run, and "
        "delete the run again",
        "published": "run {run_id} goes on: it has events after {after}; nothing was deleted",
        "open": "run {run_id} is open, and a process of it was heard of: end it first (see "
        "trinity-events status {run_id})",
        "folder": "{folder} belongs to another log of run {run_id} ({mark}): leave out "
        "--checkpoints",
    }


async def delete_run(client: redis.asyncio.Redis, run_id: str, last: str) -> int:
    """Delete a run's log and its other keys, then its listing; return the number of keys.

    The keys of the log go in one script, and the listing last: a deletion that was killed can be
    repeated. Chunks of weights expire by themselves.

    Args:
        client: Client with the rights of a reducer.
        run_id: The run.
        last: Last event that the caller knows; the run is left as it is if there is a later one.

    Raises:
        RunInUse: if a reducer leads the run, or a process has published since.
    """
    keys = RunKeys.of(run_id)
    deleted: int = await Scripts(client)(
        "delete_run", keys=[keys.events, keys.leader, *keys], args=[last]
    )
    if deleted == -1:
        raise RunInUse(run_id, "led")
    if deleted == -2:
        raise RunInUse(run_id, "published", last)
    connection: Any = client
    # Keys whose names have an incarnation or a save in them: no list of them exists.
    pattern = keys.events.removesuffix("events") + "*"
    rest = [key async for key in connection.scan_iter(match=pattern, count=_AT_ONCE)]
    for begin in range(0, len(rest), _AT_ONCE):
        # UNLINK, as DEL would free the memory in the one thread that serves all clients.
        deleted += await connection.unlink(*rest[begin : begin + _AT_ONCE])
    async with naming_wrong_type(client, RUN_INDEX, "stream"):
        listed = await connection.xrange(RUN_INDEX)
        listings = [entry_id for entry_id, fields in listed if run_of_listing(fields) == run_id]
        if listings:
            await connection.xdel(RUN_INDEX, *listings)
    return deleted
