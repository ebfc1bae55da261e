"""Starts every part, watches them, and puts them away."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import redis
from msgspec import Struct, structs
from redis.exceptions import RedisClusterException

from trinity_events.archive import Archive
from trinity_events.archive.export import whole_stream
from trinity_events.archive.ownership import own_folder
from trinity_events.core import MonitorState, RunSummary, Summarizer
from trinity_events.errors import DeadlineExceeded, TrinityError
from trinity_events.history import current_state
from trinity_events.log import RedisEventLog, Stream, open_run
from trinity_events.server import (
    WEIGHTS_SERVER,
    Wait,
    connect,
    serving,
    serving_weights,
    trinity_home,
    warn_of_eviction,
)
from trinity_events.server.connect import redacted
from trinity_events.weights.transports.shared_memory import sweep
from trinity_schemas import ContractError, StepRef, decode_envelope

from ..config import RunConfig, RunSettings, TransportChoice
from ..explorer import ExplorationResult, Explorer
from ..trainer import Trainer, TrainingResult
from .earlier import begins_anew, earlier_epoch
from .lifecycle import closing, interruptible
from .model import make_model
from .processes import ReducerProcess, local_ray
from .progress import ProgressView
from .roots import hear_of_another_folder
from .summary import TRANSPORTS, DemoSummary, summarize
from .transport import chosen_transport

logger = logging.getLogger(__name__)

EXPLORERS_DEADLINE = 60.0
"""Seconds that explorers elsewhere are given to take the last weights."""


class LaunchOptions(Struct, frozen=True, kw_only=True):
    """What the command line was told."""

    run_id: str
    alone: bool
    """Whether every part runs here; else the trainer, with a reducer and explorers elsewhere."""
    settings: RunSettings
    redis_url: str | None
    weights_redis_url: str | None
    transport: TransportChoice
    checkpoint_root: Path
    adopt_folder: bool = False
    """Whether to take over the run's folder where it belongs to another log."""
    fresh: bool = False
    """Whether to begin anew although checkpoints of the run are ready."""


class ProcessDied(TrinityError):
    """A process of the run ended while it was needed."""


async def run_job(options: LaunchOptions) -> DemoSummary:
    """Run the main job from beginning to end, and summarise it.

    Raises:
        Interrupted: on SIGINT or SIGTERM, after everything was ended and the log closed.
        TrinityError: when a part fails.
    """
    async with interruptible(options.run_id):
        return await _run(options)
    raise AssertionError("unreachable")


async def _run(options: LaunchOptions) -> DemoSummary:
    began, alone = time.monotonic(), options.alone
    chosen = chosen_transport(
        options.transport,
        explorers_here=alone,
        publish=options.settings.publish,
        deltas=options.settings.weights_full_every > 1,
    )
    transport = chosen.name
    settings = structs.replace(options.settings, transport=transport)
    view = ProgressView(options.run_id, settings.steps)
    async with AsyncExitStack() as exits:
        redis_url = exits.enter_context(serving(options.redis_url))
        weights_url = exits.enter_context(serving_weights(options.weights_redis_url, redis_url))
        client = await exits.enter_async_context(connect(redis_url))
        await warn_of_eviction(client, redis_url)
        # A chunk server that does not answer is found out now, not at the first upload.
        async with connect(weights_url, setting=WEIGHTS_SERVER) as chunks:
            if weights_url != redis_url:
                await warn_of_eviction(chunks, weights_url, setting=WEIGHTS_SERVER)
        log = RedisEventLog(client, options.run_id)
        folder = options.checkpoint_root / options.run_id
        own = partial(own_folder, log, folder, redacted(redis_url), adopt=options.adopt_folder)
        await own()  # before the run is opened: it would be opened in vain
        earlier = await earlier_epoch(log, folder, fresh=options.fresh)
        reducer = None
        if alone:
            adopted = options.adopt_folder
            reducer = ReducerProcess(redis_url, options.run_id, options.checkpoint_root, adopted)
            await exits.enter_async_context(reducer.running())
        config = settings.placed(
            run_id=options.run_id,
            epoch=await open_run(
                client,
                options.run_id,
                config=settings.to_text(),
                save_strategy=settings.save_strategy,
                transport=chosen.told(),
            ),
            redis_url=redis_url,
            weights_url=weights_url,
            checkpoint_folder=folder,
        )
        if earlier is not None:
            view.say(begins_anew(options.run_id, earlier, config.epoch))
        view.say(
            f"run {options.run_id}: weights travel by {TRANSPORTS[transport]}: {chosen.reason}"
        )
        async with closing(client, config):
            await own()  # a log that is new has its first entry by now
            view.say(f"run {options.run_id}: starting Ray, and warming the model up")
            here = config.explorers if alone else 0
            exits.callback(sweep)  # Ray may end its actors before they clear up
            await exits.enter_async_context(local_ray(config.trainers + here + 1))
            async with _shown(view, log, partial(hear_of_another_folder, client, config, view.say)):
                warm_up_steps, training, exploration = await _work(config, here)
                if not alone:
                    await _last_weights_taken(log, config, view)
        return summarize(
            training=training,
            exploration=exploration,
            log=await _summarize_log(log, config),
            seconds=time.monotonic() - began,
            warm_up_steps=warm_up_steps,
            reducer_restarts=reducer.restarts if reducer else 0,
            transport=transport,
            sharded=settings.publishes_shards,
            redis_url=redacted(redis_url),
            checkpoint_folder=str(config.checkpoint_folder),
            replay_command=_replay_command(options),
        )


async def _work(
    config: RunConfig, explorers_here: int
) -> tuple[int, TrainingResult, list[ExplorationResult]]:
    """Make the model, train and explore; returns the warm-up's steps and the results."""
    # Actors first: they import torch while the model is made.
    trainer = Trainer.get_actor(config)
    explorers = [Explorer.get_actor(config, rank) for rank in range(explorers_here)]
    warm_up_steps = await _make_model(config)
    await _all([trainer.prepare.remote(), *(one.prepare.remote() for one in explorers)])
    training, *exploration = await _all(
        [trainer.train.remote(), *(one.explore.remote() for one in explorers)]
    )
    await _all([trainer.shutdown.remote()])
    return warm_up_steps, training, exploration


async def _make_model(config: RunConfig) -> int:
    """Make the model here, where all that it needs is imported; returns the warm-up's steps."""
    make = partial(make_model, config.model_folder, config.task, config.seed)
    try:
        # Left to itself when the run is ended meanwhile: nobody loads what it makes.
        steps, _ = await anyio.to_thread.run_sync(make, abandon_on_cancel=True)
    except OSError as error:
        raise _in_words(error) from None
    return steps


async def _all(references: Sequence[Any]) -> list[Any]:
    """What the Ray calls return; the first that fails ends the wait, with its own error."""
    from ray.exceptions import RayActorError, RayTaskError

    results: list[Any] = [None] * len(references)

    async def one(index: int) -> None:
        try:
            results[index] = await references[index]
        except RayTaskError as error:
            raise _in_words(error) from None
        except RayActorError as error:
            raise ProcessDied(_of_the_dead(str(error))) from None

    async with anyio.create_task_group() as tasks:
        for index in range(len(references)):
            tasks.start_soon(one, index)
    return results


def _in_words(error: Any) -> Exception:
    """What failed in another process, as if it had failed here; itself, where it is a defect."""
    from ray.exceptions import RayTaskError

    cause = error
    while isinstance(cause, RayTaskError) and cause.cause is not None:
        cause = cause.cause
    if isinstance(cause, TrinityError | redis.RedisError | RedisClusterException):
        return cause
    return ProcessDied(f"a process of the run failed: {cause}") if _is_fault(cause) else error


def _is_fault(cause: object) -> bool:
    return isinstance(cause, OSError) and cause.errno is not None


def _of_the_dead(told: str) -> str:
    """Who died, and why, of the lines that Ray has for it."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    said = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    who = said.get("class_name", "a process").lower()
    process = f" (process {said['pid']})" if "pid" in said else ""
    return f"{who}{process} of the run died: {lines[0] if lines else 'nothing is known of why'}"


async def _last_weights_taken(log: RedisEventLog, config: RunConfig, view: ProgressView) -> None:
    """Wait until every explorer has the last version, or has stopped, or the deadline passes."""
    wait = Wait(EXPLORERS_DEADLINE, "the explorers were not seen to take the last weights")
    try:
        while True:
            state = await wait.ask(partial(current_state, log))
            late = _without_last(state, config)
            if not late:
                return
            wait.missing = f"{', '.join(late)} did not take the last weights"
            after = {Stream.EVENTS: state.position}
            await wait.ask(partial(log.wait, after, seconds=min(5, wait.left()), limit=1))
    except DeadlineExceeded as error:
        view.say(str(error))


def _without_last(state: MonitorState, config: RunConfig) -> list[str]:
    """The explorers that are at work and do not serve the last version."""
    last = StepRef(config.epoch, config.steps)
    return [
        name
        for name in (f"explorer-{rank}" for rank in range(config.explorers))
        if (explorer := state.explorers.get(name)) is not None
        and explorer.status != "stopped"
        and (explorer.version is None or explorer.version < last)
    ]


@asynccontextmanager
async def _shown(
    view: ProgressView, log: RedisEventLog, beside: Callable[[], Coroutine[Any, Any, None]]
) -> AsyncIterator[None]:
    """Show the run in the block, which goes on when that fails, and do something beside it."""

    async def follow() -> None:
        try:
            await view.follow(log)
        except Exception as error:
            logger.warning("run %s is not shown any more: %s", log.run_id, error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        tasks.start_soon(beside)
        yield
        tasks.cancel_scope.cancel()


async def _summarize_log(log: RedisEventLog, config: RunConfig) -> RunSummary:
    """What the log says of the epoch, as far as a long one is trimmed from its archive."""
    summarizer = Summarizer(log.run_id)
    archive = Archive(config.checkpoint_folder, config.run_id)
    for stream in Stream:
        begun = False
        async for entry in whole_stream(log, stream, archive):
            with suppress(ContractError):  # a dead letter, which the reducer has reported
                envelope = decode_envelope(entry.payload)
                begun = begun or envelope.epoch >= config.epoch
                if begun:
                    summarizer.add(envelope, len(entry.payload))
    return summarizer.summary()


def _replay_command(options: LaunchOptions) -> str:
    """What to type to replay the run, from any shell."""
    words = ["trinity-events", "replay", options.run_id]
    home = os.environ.get("TRINITY_HOME")
    if options.redis_url:
        words += ["--redis-url", redacted(options.redis_url)]
    if options.checkpoint_root != (trinity_home() / "checkpoints").resolve():
        # Where a long run's older entries are.
        words += ["--checkpoint-root", str(options.checkpoint_root)]
    prefix = f"TRINITY_HOME={shlex.quote(home)} " if home else ""
    return prefix + shlex.join(words)
