"""One explorer as a process of its own: it needs the run's servers and folder, and no Ray."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import anyio
import redis.asyncio
from msgspec import Struct

from trinity_events.errors import RunNotFound, TrinityError
from trinity_events.log import RedisEventLog, require_run
from trinity_events.server import connect, serving, serving_weights
from trinity_schemas import EpochClosed

from ..config import RunConfig, TrainConfig
from ..explorer import ExplorationResult, Explorer
from ..explorer.run_follower import RunFollower, followed_run
from ..explorer.versions import RunEnded, VersionFollower
from ..health import beating
from .epochs import EpochFollower, Opening
from .lifecycle import interruptible
from .ranks import claimed_rank

logger = logging.getLogger(__name__)


class ExplorerOptions(Struct, frozen=True, kw_only=True):
    """Options of the command `explorer`."""

    run_id: str
    rank: int | None
    redis_url: str | None
    weights_redis_url: str | None
    checkpoint_root: Path
    wait: float
    health_file: Path | None = None


class RunFailed(TrinityError):
    """Raised if the trainer gave the run up."""


class NoSettings(TrinityError):
    """Raised if the run was opened without its configuration, or with one without explorers."""


async def run_explorer(options: ExplorerOptions) -> ExplorationResult | None:
    """Explore the run's newest epoch to its end, from the start when a newer one is opened.

    Returns:
        Its result, or None if the trainer ended the run before.

    Raises:
        Interrupted: on SIGINT or SIGTERM.
        TrinityError: If the run is not opened in time, or fails.
    """
    async with (
        interruptible(options.run_id),
        beating(options.health_file),
        AsyncExitStack() as exits,
    ):
        redis_url = exits.enter_context(serving(options.redis_url))
        weights_url = exits.enter_context(serving_weights(options.weights_redis_url, redis_url))
        client = await exits.enter_async_context(connect(redis_url))
        log = RedisEventLog(client, options.run_id)
        await _tell_nearest(client, log, options.wait)
        folder = options.checkpoint_root / options.run_id
        run = await exits.enter_async_context(followed_run(options.run_id, redis_url))
        epochs = EpochFollower(run)
        await exits.enter_async_context(epochs.listening())
        outcome: ExplorationResult | EpochClosed | None = None
        while outcome is None:
            opening = await epochs.opened(options.wait)
            if isinstance(opening, EpochClosed):
                outcome = opening
                continue
            config = _settings(opening, options.run_id).placed(
                run_id=options.run_id,
                epoch=opening.epoch,
                redis_url=redis_url,
                weights_url=weights_url,
                checkpoint_folder=folder,
            )
            async with claimed_rank(client, config, options.rank) as rank:
                outcome = await _epoch(config, rank, run, epochs, opening)
            if outcome is None:
                logger.warning("run %s was opened anew: starting over", options.run_id)
        if isinstance(outcome, EpochClosed):
            if outcome.reason == "failed":
                raise RunFailed(f"run {options.run_id} failed: {outcome.error}")
            return None
        return outcome
    raise AssertionError("unreachable")


async def _tell_nearest(client: redis.asyncio.Redis, log: RedisEventLog, wait: float) -> None:
    """Tell at once that the server does not know the run, whose name may be mistyped."""
    with suppress(redis.RedisError, OSError):  # it is waited for like the run
        if not await log.newest_epoch():
            try:
                await require_run(client, log.run_id, f"waiting up to {wait:g} s for it")
            except RunNotFound as error:
                logger.warning("%s", error)


async def _epoch(
    config: RunConfig, rank: int, run: RunFollower, epochs: EpochFollower, opening: Opening
) -> ExplorationResult | EpochClosed | None:
    """Explore one epoch; return None if another one has taken its place."""
    outcome: ExplorationResult | EpochClosed | None = None
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            nonlocal outcome
            closed = outcome = await epochs.ended(opening)
            if closed is None or closed.reason != "finished":
                tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            result = await _explore(config, rank, run)
        except RunEnded:
            outcome = await epochs.ended(opening)
        else:
            outcome = result
        tasks.cancel_scope.cancel()
    return outcome


async def _explore(config: RunConfig, rank: int, run: RunFollower) -> ExplorationResult:
    explorer = Explorer(config, rank)
    explorer.join()
    try:
        # The first version is ready: so the model's folder is whole, and its settings are final.
        versions = VersionFollower(run, config.epoch, method=config.sync.method)
        async with versions.listening():
            await versions.wait(0, deadline=config.sync.timeout)
        await explorer.prepare()
        return await explorer.explore(run)
    finally:
        explorer.leave()


def _settings(opening: Opening, run_id: str) -> TrainConfig:
    if opening.config is None:
        raise NoSettings(
            f"epoch {opening.epoch} of run {run_id} was opened without its settings: "
            "open it with trinity-events trainer"
        )
    settings = TrainConfig.from_text(opening.config)
    if settings.trainer.colocated:
        raise NoSettings(
            f"run {run_id} takes no explorers: its trainer's ranks answer the rollouts "
            "(trainer.colocated true)"
        )
    return settings
