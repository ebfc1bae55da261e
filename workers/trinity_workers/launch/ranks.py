"""Telling explorers apart that were all started alike: each takes a rank that is free."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import redis.asyncio

from trinity_events.errors import TrinityError
from trinity_events.log.scripts import lua_script
from trinity_schemas import explorer_key

from ..config import RunConfig

logger = logging.getLogger(__name__)

LEASE = 10.0
"""Seconds after which the rank of an explorer that is silent may be taken."""


class NoSuchRank(TrinityError):
    """The run has fewer explorers."""


class RankLost(TrinityError):
    """The explorer was silent for so long that another may have its rank."""


@asynccontextmanager
async def claimed_rank(
    client: redis.asyncio.Redis, config: RunConfig, given: int | None
) -> AsyncIterator[int]:
    """The rank given, or the lowest of the epoch's ranks that is free, claimed for the block.

    Waits while every rank is taken: such an explorer is a spare.

    Raises:
        RankLost: in the block, when the claim could not be kept.
    """
    if given is not None:
        if given >= config.explorers:
            raise NoSuchRank(
                f"run {config.run_id} has {config.explorers} explorers, so rank {given} is none of "
                f"them: give --rank 0 to {config.explorers - 1}, or leave it out"
            )
        yield given
        return
    renew = lua_script(client, "renew")
    me = secrets.token_hex(8)
    rank = await _claim(client, config, me)
    key = explorer_key(config.run_id, config.epoch, rank)

    async def keep() -> None:
        while True:
            await anyio.sleep(LEASE / 4)
            if not await renew(keys=[key], args=[me, int(LEASE * 1000)]):
                raise RankLost(f"explorer rank {rank} of run {config.run_id} was lost")

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep)
            yield rank
            tasks.cancel_scope.cancel()
    finally:
        with anyio.move_on_after(2, shield=True):
            await renew(keys=[key], args=[me, 0])


async def _claim(client: redis.asyncio.Redis, config: RunConfig, me: str) -> int:
    waiting = False
    while True:
        for rank in range(config.explorers):
            key = explorer_key(config.run_id, config.epoch, rank)
            if await client.set(key, me, nx=True, px=int(LEASE * 1000)):
                return rank
        if not waiting:
            waiting = True
            logger.warning(
                "all %d explorer ranks of run %s are taken: waiting for one",
                config.explorers,
                config.run_id,
            )
        # As the reducer's lead: the other's lease says how long to wait at least.
        await anyio.sleep(LEASE / 10)
