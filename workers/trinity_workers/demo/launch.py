"""Starts every part, watches them, and puts them away."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import redis.asyncio
from msgspec import Struct

from trinity_events.core import RunSummary, Summarizer
from trinity_events.errors import DeadlineExceeded, TrinityError
from trinity_events.history import read_all
from trinity_events.log import (
    AsyncPublisher,
    RedisEventLog,
    Stream,
    new_producer,
    open_run,
    position,
)
from trinity_events.server import connect, serving, serving_weights, trinity_home
from trinity_schemas import ContractError, RunClosed, decode_envelope

from ..config import RunConfig
from ..explorer import ExplorationResult, Explorer
from ..trainer import Trainer, TrainingResult
from .model import make_model
from .processes import ReducerProcess, local_ray
from .progress import ProgressView
from .summary import DemoSummary, summarize

_REDUCER_DEADLINE = 30.0


class DemoOptions(Struct, frozen=True, kw_only=True):
    """What the command line was told."""

    run_id: str
    steps: int
    trainers: int
    explorers: int
    sync_interval: int
    sync_offset: int
    save_interval: int
    seed: int
    redis_url: str | None
    weights_redis_url: str | None
    checkpoint_root: Path


class ProcessDied(TrinityError):
    """A process of the run ended while it was needed."""


class Interrupted(TrinityError):
    """Somebody asked the run to end."""


async def run_demo(options: DemoOptions) -> DemoSummary:
    """Run the main job from beginning to end, and summarise it.

    Raises:
        Interrupted: on SIGINT or SIGTERM, after everything was ended and the log closed.
        TrinityError: when a part fails.
    """
    try:
        async with _interruptible(options.run_id), AsyncExitStack() as exits:
            return await _run(options, exits)
    except BaseExceptionGroup as group:
        # Task groups nest; what happened is what one reads for.
        raise _first(group) from None
    raise AssertionError("unreachable")


async def _run(options: DemoOptions, exits: AsyncExitStack) -> DemoSummary:
    began = time.monotonic()
    root = options.checkpoint_root
    folder = trinity_home() / "runs" / options.run_id
    folder.mkdir(parents=True, exist_ok=True)
    view = ProgressView(options.run_id, options.steps)

    redis_url = exits.enter_context(serving(options.redis_url))
    weights_url = exits.enter_context(serving_weights(options.weights_redis_url, redis_url))
    client = await exits.enter_async_context(connect(redis_url))
    async with connect(weights_url):
        pass  # a chunk server that does not answer is found out now, not at the first upload
    reducer = ReducerProcess(redis_url, options.run_id, root, folder / "reducer.log")
    await exits.enter_async_context(reducer.running())
    config = RunConfig(
        run_id=options.run_id,
        epoch=await open_run(client, options.run_id),
        redis_url=redis_url,
        weights_url=weights_url,
        checkpoint_folder=root / options.run_id,
        model_folder=folder / "model",
        trainers=options.trainers,
        explorers=options.explorers,
        seed=options.seed,
        steps=options.steps,
        sync_interval=options.sync_interval,
        sync_offset=options.sync_offset,
        save_interval=options.save_interval,
    )
    async with _closing(client, config):
        view.say(f"run {options.run_id}: starting Ray, and warming the model up")
        ray = exits.enter_context(local_ray(options.trainers + options.explorers + 1))
        async with _shown(view, RedisEventLog(client, config.run_id)):
            warm_up_steps, training, exploration = await _work(ray, config)
    return summarize(
        training=training,
        exploration=exploration,
        log=await _summarize_log(RedisEventLog(client, config.run_id)),
        seconds=time.monotonic() - began,
        warm_up_steps=warm_up_steps,
        reducer_restarts=reducer.restarts,
        redis_url=redis_url,
        checkpoint_folder=str(config.checkpoint_folder),
        replay_command=_replay_command(options),
    )


async def _work(ray: Any, config: RunConfig) -> tuple[int, TrainingResult, list[ExplorationResult]]:
    """Make the model, train and explore; returns the warm-up's steps and the results."""
    # Actors first: they import torch while the model is made.
    trainer = Trainer.get_actor(config)
    explorers = [Explorer.get_actor(config, rank) for rank in range(config.explorers)]
    make = ray.remote(num_cpus=0)(make_model)
    [(warm_up_steps, _)] = await _all([make.remote(config.model_folder, config.task, config.seed)])
    await _all([trainer.prepare.remote(), *(one.prepare.remote() for one in explorers)])
    training, *exploration = await _all(
        [trainer.train.remote(), *(one.explore.remote() for one in explorers)]
    )
    await _all([trainer.shutdown.remote()])
    return warm_up_steps, training, exploration


async def _all(references: Sequence[Any]) -> list[Any]:
    """What the Ray calls return; the first that fails ends the wait, with its own error."""
    from ray.exceptions import RayActorError, RayTaskError

    results: list[Any] = [None] * len(references)

    async def one(index: int) -> None:
        try:
            results[index] = await references[index]
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, TrinityError) else error) from None
        except RayActorError as error:
            raise ProcessDied(f"a process of the run died: {error}") from None

    async with anyio.create_task_group() as tasks:
        for index in range(len(references)):
            tasks.start_soon(one, index)
    return results


@asynccontextmanager
async def _interruptible(run_id: str) -> AsyncIterator[None]:
    """Turn SIGINT and SIGTERM into an orderly end of the block."""
    interrupted = False
    async with anyio.create_task_group() as tasks:

        async def listen() -> None:
            nonlocal interrupted
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    interrupted = True
                    tasks.cancel_scope.cancel()

        tasks.start_soon(listen)
        yield
        tasks.cancel_scope.cancel()
    if interrupted:
        raise Interrupted(
            f"run {run_id} was interrupted; look at what it did with: "
            f"trinity-events replay {run_id}"
        )


@asynccontextmanager
async def _closing(client: redis.asyncio.Redis, config: RunConfig) -> AsyncIterator[None]:
    """Close the run however the block ends, and let the reducer come to its end."""
    log = RedisEventLog(client, config.run_id)
    closed = RunClosed(reason="finished", step=config.steps)
    try:
        yield
    except anyio.get_cancelled_exc_class():
        closed = RunClosed(reason="interrupted")
        raise
    except BaseException as error:
        closed = RunClosed(reason="failed", error=_sentence(error))
        raise
    finally:
        with anyio.CancelScope(shield=True):
            publisher = AsyncPublisher(log, config.epoch, new_producer("launcher"))
            last = await publisher.publish(closed)
            await _folded(log, last)


async def _folded(log: RedisEventLog, entry_id: str) -> None:
    """Wait until the reducer has folded the entry."""
    with anyio.move_on_after(_REDUCER_DEADLINE):
        while position((await log.load())[1]) < position(entry_id):  # noqa: ASYNC110
            await anyio.sleep(0.02)
        return
    raise DeadlineExceeded(
        f"the reducer of run {log.run_id} did not reach its end within {_REDUCER_DEADLINE:g} s: "
        f"see {trinity_home()}/runs/{log.run_id}/reducer.log"
    )


@asynccontextmanager
async def _shown(view: ProgressView, log: RedisEventLog) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(view.follow, log)
        yield
        tasks.cancel_scope.cancel()


async def _summarize_log(log: RedisEventLog) -> RunSummary:
    summarizer = Summarizer(log.run_id)
    for stream in Stream:
        async for entry in read_all(log, stream):
            with suppress(ContractError):  # a dead letter, which the reducer has reported
                summarizer.add(decode_envelope(entry.payload), len(entry.payload))
    return summarizer.summary()


def _first(error: BaseException) -> BaseException:
    """The first error of a group of groups, preferring those that are meant for people."""
    leaves = [error]
    while any(isinstance(leaf, BaseExceptionGroup) for leaf in leaves):
        leaves = [
            one
            for leaf in leaves
            for one in (leaf.exceptions if isinstance(leaf, BaseExceptionGroup) else (leaf,))
        ]
    return next((leaf for leaf in leaves if isinstance(leaf, TrinityError)), leaves[0])


def _sentence(error: BaseException) -> str:
    first = _first(error)
    return f"{type(first).__name__}: {first}"[:2000]


def _replay_command(options: DemoOptions) -> str:
    server = f" --redis-url {options.redis_url}" if options.redis_url else ""
    home = os.environ.get("TRINITY_HOME")
    prefix = f"TRINITY_HOME={home} " if home and not server else ""
    return f"{prefix}trinity-events replay {options.run_id}{server}"
