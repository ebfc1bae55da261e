"""Ranks of explorers, each held by a lease: an explorer without a given rank claims a free one.

1. Of two explorers without a given rank, at most one holds a rank (``SET`` with ``NX``).
2. A claim is renewed by its token alone: an explorer never renews the claim of another one.
3. A claim that lapsed is made again, or raises RankLost where another explorer has the rank.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count

import anyio
import redis
import redis.asyncio

from trinity_events.errors import TrinityError
from trinity_events.log.redis.scripts import lua_script
from trinity_events.log.retry import CONNECTION_ERRORS
from trinity_events.server import Deadline
from trinity_schemas import explorer_key

from ..config.train_config import RunConfig

logger = logging.getLogger(__name__)

LEASE = 10.0
"""Seconds after which the rank of an explorer that is silent may be taken, by default."""
_RENEWED = 0.7
"""Part of the lease that is left to a rank whose explorer renews it."""


class RankLost(TrinityError):
    """The explorer was silent for so long that another one has its rank.

    Attributes:
        run_id: The run.
        rank: The rank.
    """

    run_id: str
    rank: int
    text = "explorer rank {rank} of run {run_id} was lost to another, while this one was silent"


@asynccontextmanager
async def claimed_rank(
    client: redis.asyncio.Redis, config: RunConfig, given: int | None, lease: float = LEASE
) -> AsyncIterator[int]:
    """Claim the lowest rank of the epoch that is free, for the block; or take the given one.

    There are as many ranks as explorers. A rank whose explorer has missed renewals is waited for:
    an explorer that is started in the place of a dead one gets its rank. A claim that lapses while
    the server is away is made anew, unless another explorer was faster. A given rank is taken
    although another explorer has it: its key only tells that the explorer lives.

    Raises:
        RankLost: Another explorer has the rank; raised in the block.
        DeadlineExceeded: The server stays away for the run's ``sync.timeout``.
    """
    claims = _Claims(client, config, lease, exclusive=given is None)
    rank = await _claim(claims, config, given)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_renew_claim, claims, rank, config)
            yield rank
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True), suppress(redis.RedisError, *CONNECTION_ERRORS):
            # Not longer: the lease frees the rank as well.
            with anyio.move_on_after(2):
                await claims.give_up(rank)


class _Claims:
    """Claims of one explorer on the ranks of an epoch."""

    def __init__(
        self, client: redis.asyncio.Redis, config: RunConfig, lease: float, *, exclusive: bool
    ) -> None:
        self.lease = lease
        self._redis = client
        self._renew = lua_script(client, "renew")
        self._config = config
        self._exclusive = exclusive
        self._me = secrets.token_hex(8)

    async def hold(self, rank: int) -> bool:
        """Hold the rank for one more lease; return False if another explorer has it."""
        lease = int(self.lease * 1000)
        # It is renewed first: the reply to an earlier claim may have been lost.
        if await self._renew(keys=[self._key(rank)], args=[self._me, lease]):
            return True
        key, new = self._key(rank), self._exclusive
        return bool(await self._redis.set(key, self._me, nx=new, px=lease))

    async def left(self, rank: int) -> float:
        """Return the seconds after which the rank is free; 0 if it is."""
        return max(int(await self._redis.pttl(self._key(rank))), 0) / 1000

    async def give_up(self, rank: int) -> None:
        """Release the rank at once."""
        await self._renew(keys=[self._key(rank)], args=[self._me, 0])

    def _key(self, rank: int) -> str:
        return explorer_key(self._config.run_id, self._config.epoch, rank)


async def _renew_claim(claims: _Claims, rank: int, config: RunConfig) -> None:
    what = f"explorer rank {rank} of run {config.run_id}"
    wait = Deadline(config.sync.timeout, f"{what} was not held")
    while True:
        # Three renewals may fail or be late before another explorer takes the rank.
        await anyio.sleep(claims.lease / 4)
        wait.renew()
        if not await wait.retry(partial(claims.hold, rank)):
            raise RankLost(config.run_id, rank)


async def _claim(claims: _Claims, config: RunConfig, given: int | None) -> int:
    wait = Deadline(config.sync.timeout, f"no explorer rank of run {config.run_id} was claimed")
    for rank in count() if given is None else [given]:
        while not await wait.retry(partial(claims.hold, rank)):
            seconds = await wait.retry(partial(claims.left, rank))
            # Its explorer lives: the next rank.
            if seconds > _RENEWED * claims.lease:
                break
            await anyio.sleep(claims.lease / 20)  # No event tells of a renewal, or of a lapse.
        else:
            return rank
    raise AssertionError("unreachable")
