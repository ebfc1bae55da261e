"""Telling explorers apart that were all started alike: each takes a rank that is free."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
import redis
import redis.asyncio

from trinity_events.errors import TrinityError
from trinity_events.log.retry import CONNECTION_ERRORS
from trinity_events.log.scripts import lua_script
from trinity_events.server import Deadline
from trinity_schemas import explorer_key

from ..config import RunConfig

logger = logging.getLogger(__name__)

LEASE = 10.0
"""Seconds after which the rank of an explorer that is silent may be taken."""


class NoSuchRank(TrinityError):
    """The run has fewer explorers."""


class RankLost(TrinityError):
    """The explorer was silent for so long that another has its rank."""


@asynccontextmanager
async def claimed_rank(
    client: redis.asyncio.Redis, config: RunConfig, given: int | None
) -> AsyncIterator[int]:
    """The rank given, or the lowest of the epoch's ranks that is free, claimed for the block.

    Waits while every rank is taken: such an explorer is a spare. A server that is away is waited
    for; a claim that lapses meanwhile is made anew, unless another was faster.

    Raises:
        RankLost: in the block, when another has the rank.
        DeadlineExceeded: when the server stays away for the run's ``sync.timeout``.
    """
    if given is not None:
        if given >= config.explorer.count:
            raise NoSuchRank(
                f"run {config.run_id} has {config.explorer.count} explorers, so rank {given} is "
                f"none of them: give --rank 0 to {config.explorer.count - 1}, or leave it out"
            )
        yield given
        return
    claims = _Claims(client, config)
    rank = await _claim(claims, config)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_keep, claims, rank, config)
            yield rank
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True), suppress(redis.RedisError, *CONNECTION_ERRORS):
            with anyio.move_on_after(2):
                await claims.give_up(rank)


class _Claims:
    """What one explorer may have of an epoch's ranks."""

    def __init__(self, client: redis.asyncio.Redis, config: RunConfig) -> None:
        self._redis = client
        self._renew = lua_script(client, "renew")
        self._config = config
        self._me = secrets.token_hex(8)

    async def hold(self, rank: int) -> bool:
        """Have the rank for one more lease. False when it is another's."""
        lease = int(LEASE * 1000)
        # Renewed first: a claim may be ours whose reply was lost.
        if await self._renew(keys=[self._key(rank)], args=[self._me, lease]):
            return True
        return bool(await self._redis.set(self._key(rank), self._me, nx=True, px=lease))

    async def give_up(self, rank: int) -> None:
        """Let another have it at once."""
        await self._renew(keys=[self._key(rank)], args=[self._me, 0])

    def _key(self, rank: int) -> str:
        return explorer_key(self._config.run_id, self._config.epoch, rank)


async def _keep(claims: _Claims, rank: int, config: RunConfig) -> None:
    what = f"explorer rank {rank} of run {config.run_id}"
    wait = Deadline(config.sync.timeout, f"{what} was not held")
    while True:
        await anyio.sleep(LEASE / 4)
        wait.renew()
        if not await wait.ask(partial(claims.hold, rank)):
            raise RankLost(f"{what} was lost to another, while this one was silent")


async def _claim(claims: _Claims, config: RunConfig) -> int:
    wait = Deadline(config.sync.timeout, f"no explorer rank of run {config.run_id} was claimed")
    waiting = False
    while True:
        wait.renew()
        for rank in range(config.explorer.count):
            if await wait.ask(partial(claims.hold, rank)):
                return rank
        if not waiting:
            waiting = True
            logger.warning(
                "all %d explorer ranks of run %s are taken: waiting for one",
                config.explorer.count,
                config.run_id,
            )
        await anyio.sleep(LEASE / 10)  # nothing tells when another gives one up, or lets it lapse
