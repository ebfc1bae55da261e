"""One explorer as a process of its own: it needs the run's servers and folder, and no Ray.

1. It explores one epoch at a time, on a rank that it holds. A newer epoch cancels the present one.
2. A finished epoch is explored to its last version. After another end, a newer epoch is waited for.
3. A silent trainer is given up ``explorer.wait_for_run`` seconds after the first silence. Requests
   that were answered begin the count again.
4. Settings of each epoch are checked before anything that they name is imported.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, suppress
from dataclasses import field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

import anyio
import redis.asyncio
from msgspec import Struct

from trinity_events.errors import DeadlineExceeded, RunNotFound, TrinityError
from trinity_events.log import RedisEventLog, require_run
from trinity_events.server import connect, serving, serving_weights
from trinity_events.system.error_text import ungrouped
from trinity_schemas import EpochClosed

from ..config.train_config import RunConfig, TrainConfig
from ..config.trusted_settings import Host, OwnConfig, merge
from ..explorer.explorer import Explorer
from ..explorer.result import ExplorationResult
from ..explorer.run_follower import RunFollower, followed_run
from ..explorer.versions import RunEnded, VersionFollower
from ..runtime.health import beating
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
    device: str | None = None
    """Device on which it serves the policy; None takes that of the settings, else a GPU."""
    own: OwnConfig | None = None
    """Configuration that the explorer's side gives; without it, all is read from the log."""


class RunWait(NamedTuple):
    """Wait for a run to be opened, and the option or setting that bounds it."""

    seconds: float
    setting: str

    def __str__(self) -> str:
        """Return the end of a sentence about a run that was closed; empty without a wait."""
        if not self.seconds:
            return ""
        return f", and the run was not opened again within {self.seconds:g} s ({self.setting})"


NO_WAIT = RunWait(0.0, "")


class Unexplored(Struct, frozen=True, kw_only=True):
    """End of an explorer without a result: the run was closed, and no newer epoch came in time."""

    run_id: str
    reason: Literal["finished", "interrupted"]
    waited: RunWait

    def __str__(self) -> str:
        """Return the sentence for the user."""
        reason = _format_reason(self.reason)
        return f"run {self.run_id} {reason}{self.waited}: there is nothing to explore"


class RunFailed(TrinityError):
    """The trainer gave the run up, and no newer epoch came in time.

    Attributes:
        run_id: The run.
        error: The error with which it was closed.
        waited: Wait for a newer epoch.
    """

    run_id: str
    error: str | None
    waited: RunWait
    text = "run {run_id} failed: {error}{waited}"


class TrainerSilent(DeadlineExceeded):
    """The trainer neither asked nor published, and was given up.

    Attributes:
        run_id: The run.
        silence: The wait that passed its deadline.
        waited: Wait for the trainer after that, or for a newer epoch.
    """

    missing: str = field(init=False)
    deadline: float = field(init=False)
    reason: str = field(init=False)
    run_id: str
    silence: DeadlineExceeded
    waited: RunWait
    text = "{silence}{waited}"

    def __post_init__(self) -> None:
        self.missing, self.deadline = self.silence.missing, self.silence.deadline
        self.reason = self.silence.reason


class NoSettings(TrinityError):
    """The run was opened without its configuration, or with one without explorers.

    Attributes:
        run_id: The run.
        epoch: Its epoch.
        fault: ``absent`` without a configuration, ``colocated`` without explorers.
    """

    run_id: str
    epoch: int
    fault: Literal["absent", "colocated"]
    texts: ClassVar = {
        "absent": "epoch {epoch} of run {run_id} was opened without its settings: open it with "
        "trinity-events train --parts trainer",
        "colocated": "run {run_id} takes no explorers: its trainer's ranks answer the rollouts "
        "(trainer.colocated true)",
    }


async def run_explorer(options: ExplorerOptions) -> ExplorationResult | Unexplored:
    """Explore the run's newest epoch to its end, from the start when a newer one is opened.

    After an epoch that failed or was interrupted, a newer one is waited for, for
    ``explorer.wait_for_run`` seconds. If the trainer is silent, the explorer starts over meanwhile.

    Returns:
        Its result, or how the run ended before there was one.

    Raises:
        Interrupted: on SIGINT or SIGTERM.
        SettingsRefused: The log names code, a path, a URL or an environment variable that the
            options do not.
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
        await _report_nearest(client, log, options.wait)
        folder = options.checkpoint_root / options.run_id
        run = await exits.enter_async_context(followed_run(options.run_id, redis_url))
        epochs = EpochFollower(run)
        await exits.enter_async_context(epochs.listening())
        place = _ExplorerPlace(options, client, redis_url, weights_url, folder, run)
        return await _explore_epochs(place, epochs)
    raise AssertionError("unreachable")


class _ExplorerPlace(NamedTuple):
    """Servers and folder of an explorer, and the follower of its run."""

    options: ExplorerOptions
    client: redis.asyncio.Redis
    redis_url: str
    weights_url: str
    folder: Path
    run: RunFollower

    def get_config(self, opening: Opening) -> RunConfig:
        """Return the configuration of an epoch. Raises as :func:`run_explorer`."""
        return _settings(opening, self.options).placed(
            run_id=self.options.run_id,
            epoch=opening.epoch,
            redis_url=self.redis_url,
            weights_url=self.weights_url,
            checkpoint_folder=self.folder,
        )


async def _explore_epochs(
    place: _ExplorerPlace, epochs: EpochFollower
) -> ExplorationResult | Unexplored:
    """Explore one epoch after the other, until one comes to its end or none follows in time."""
    run_id, first_wait = place.options.run_id, RunWait(place.options.wait, "--wait")
    wait, silence = first_wait, None
    while True:
        opening = await epochs.opened(wait.seconds)
        if isinstance(opening, EpochClosed):
            return _get_end(run_id, opening, wait)
        config = place.get_config(opening)
        wait = _wait_for_run(config)
        try:
            with ungrouped():
                async with claimed_rank(place.client, config, place.options.rank) as rank:
                    explorer = Explorer(config, rank, place.options.device)
                    outcome = await _epoch(explorer, place.run, epochs, opening, silence)
        # Before its base class, DeadlineExceeded, which begins a silence.
        except TrainerSilent:
            raise
        except DeadlineExceeded as error:  # the server is away
            outcome = _Silence.extend(silence, error, wait)
        silence = outcome if isinstance(outcome, _Silence) else None
        if isinstance(outcome, ExplorationResult):
            return outcome
        if isinstance(outcome, _Silence):
            if anyio.current_time() >= outcome.until:
                raise TrainerSilent(run_id, outcome.error, wait) from outcome.error
            logger.warning("%s: starting over, for up to %g s", outcome.error, wait.seconds)
        elif outcome is None:  # the newer epoch is known, and may even have ended
            logger.warning("run %s was opened anew: starting over", run_id)
            # A run that is opened anew has its own beginning: the option bounds the wait again.
            wait = first_wait
        elif outcome.reason == "finished" or not wait.seconds:
            return _get_end(run_id, outcome, NO_WAIT)
        else:
            logger.warning(
                "run %s %s: waiting up to %g s for it to be opened again",
                *(run_id, _format_reason(outcome.reason), wait.seconds),
            )


class _Silence(NamedTuple):
    """Outcome of an epoch whose trainer neither asked nor published for ``sync.timeout``.

    The trainer may be slow, or have died without a word. So the explorer starts over, in the same
    epoch or in a newer one, until the trainer is given up.
    """

    error: DeadlineExceeded
    until: float
    """Moment at which the trainer is given up, by the event loop's clock."""

    @classmethod
    def extend(cls, silence: Self | None, error: DeadlineExceeded, wait: RunWait) -> Self:
        """Return the silence that an error begins, or goes on with."""
        until = anyio.current_time() + wait.seconds if silence is None else silence.until
        return cls(error, until)


def _get_end(run_id: str, closed: EpochClosed, waited: RunWait) -> Unexplored:
    """Return the end of a run without a result. Raises RunFailed if the run failed."""
    if closed.reason == "failed":
        raise RunFailed(run_id, closed.error, waited)
    return Unexplored(run_id=run_id, reason=closed.reason, waited=waited)


def _wait_for_run(config: RunConfig) -> RunWait:
    return RunWait(config.explorer.wait_for_run, "explorer.wait_for_run")


def _format_reason(reason: str) -> str:
    return {"failed": "failed", "interrupted": "was interrupted"}.get(reason, "was closed")


async def _report_nearest(client: redis.asyncio.Redis, log: RedisEventLog, wait: float) -> None:
    """Tell at once that the server does not know the run, whose name may be mistyped."""
    with suppress(redis.RedisError, OSError):  # it is waited for like the run
        if not await log.newest_epoch():
            try:
                await require_run(client, log.run_id, f"waiting up to {wait:g} s for it")
            except RunNotFound as error:
                logger.warning("%s", error)


async def _epoch(
    explorer: Explorer,
    run: RunFollower,
    epochs: EpochFollower,
    opening: Opening,
    silence: _Silence | None,
) -> ExplorationResult | EpochClosed | _Silence | None:
    """Explore one epoch; return None if another one has taken its place.

    After a silence the epoch is given up at its end, unless requests were answered meanwhile.
    """
    outcome: ExplorationResult | EpochClosed | _Silence | None = None
    config = explorer.config
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            nonlocal outcome
            closed = outcome = await epochs.ended(opening)
            # A finished run is explored to its end: its last version may not be installed yet.
            if closed is None or closed.reason != "finished":
                tasks.cancel_scope.cancel()

        async def give_up(silence: _Silence) -> None:
            nonlocal outcome
            await anyio.sleep_until(silence.until)
            # Requests that were answered are a sign of the trainer, which ends the silence.
            if not explorer.groups:
                outcome = silence
                tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        if silence is not None:
            tasks.start_soon(give_up, silence)
        try:
            result = await _explore(explorer, run)
        # The announcement has the reason, by which the caller waits for another epoch or ends.
        except RunEnded:
            outcome = await epochs.ended(opening)
        except DeadlineExceeded as error:
            if isinstance(outcome, EpochClosed) and outcome.reason == "finished":
                raise TrainerSilent(config.run_id, error, NO_WAIT) from error
            earlier = None if explorer.groups else silence
            outcome = _Silence.extend(earlier, error, _wait_for_run(config))
        else:
            outcome = result
        tasks.cancel_scope.cancel()
    return outcome


async def _explore(explorer: Explorer, run: RunFollower) -> ExplorationResult:
    config = explorer.config
    explorer.join()
    try:
        # The first version is ready: so the model's folder is whole, and its settings are final.
        versions = VersionFollower(run, config.epoch, method=config.sync.method)
        async with versions.listening():
            await versions.wait(0, deadline=config.sync.timeout)
        await explorer.prepare()
        return await explorer.explore(run)
    finally:
        # For errors before explore(), which leaves by itself.
        explorer.leave()


def _settings(opening: Opening, options: ExplorerOptions) -> TrainConfig:
    """Return the configuration of an epoch, before anything that it names is imported."""
    if opening.config is None:
        raise NoSettings(options.run_id, opening.epoch, "absent")
    logged = TrainConfig.from_text(opening.config)
    if logged.trainer.colocated:
        raise NoSettings(options.run_id, opening.epoch, "colocated")
    return merge(options.run_id, logged, options.own, Host.local(options.checkpoint_root))
