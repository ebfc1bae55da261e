"""Check that the reducer uses the folder that the trainer writes to."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
import anyio.to_thread
import redis.asyncio

from trinity_events.log import RedisEventLog
from trinity_events.log.reducer_root import other_folder
from trinity_events.subscriptions import subscribe
from trinity_schemas import StepReady

from ..config.train_config import RunConfig

logger = logging.getLogger(__name__)

_AGAIN = 2.0
"""Seconds for which a network's file system may show what was there before."""


async def report_other_folder(
    client: redis.asyncio.Redis, config: RunConfig, say: Callable[[str], None]
) -> None:
    """Say once that the reducer uses another folder; whatever fails of it, the run goes on."""
    try:
        await _report(RedisEventLog(client, config.run_id), config, say)
    except Exception as error:
        logger.warning("it is not known where the reducer of run %s is: %s", config.run_id, error)


async def _report(log: RedisEventLog, config: RunConfig, say: Callable[[str], None]) -> None:
    heard = False
    async with subscribe(config.run_id, StepReady, redis_url=config.redis_url) as events:
        async for event in events:
            # What a reducer announced it has read: it leads, or did until just now.
            # Weights come with every step: after the first look, other kinds are often enough.
            if event.epoch != config.epoch or (heard and event.kind == "weights"):
                continue
            heard = True
            if await _other_folder(log, config) is None:
                continue
            await anyio.sleep(_AGAIN)
            if (warning := await _other_folder(log, config)) is not None:
                say(f"warning: {warning}")
                return


async def _other_folder(log: RedisEventLog, config: RunConfig) -> str | None:
    leader_folder = await log.get_leader_folder()
    folder, run_id = config.checkpoint_folder, config.run_id
    return await anyio.to_thread.run_sync(other_folder, leader_folder, folder, run_id)
