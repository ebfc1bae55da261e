"""Steps that are ready: wait for one, and find the newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import anyio

from trinity_schemas import Kind, StepReady, StepRef, StepSuperseded

from ..analysis.explain import explain
from ..checkpoints.layout import final_name
from ..core import MonitorState
from ..core.lineage import is_in_lineage
from ..errors import DeadlineExceeded, StepNotReady
from ..log import RedisEventLog, require_run
from ..replay import current_state
from ..server import connect, serving, trinity_home
from ..subscriptions import subscribe

_EXPLAINING = 5.0
"""Seconds in which a wait that is over asks for the reason."""


class ReadyCheckpoint(NamedTuple):
    """Newest checkpoint of a run."""

    epoch: int
    step: int
    folder: Path


async def wait_ready(
    run: str,
    step: int,
    kind: Kind = "weights",
    *,
    epoch: int | None = None,
    deadline: float | None = None,
    redis_url: str | None = None,
) -> StepReady:
    """Wait until a kind of a step is ready; return its announcement.

    A failed step may still become ready by another attempt, so the wait goes on.

    Args:
        run: The run's id.
        step: The training step.
        kind: ``weights``, ``checkpoint`` or ``state_dict``.
        epoch: Epoch of the step; by default any epoch that the current one continues, or a later.
        deadline: Seconds to wait; None waits forever.
        redis_url: The server; ``TRINITY_REDIS_URL`` by default, else the embedded server.

    Raises:
        DeadlineExceeded: after ``deadline`` seconds, with what the step lacks.
        StepNotReady: if a newer step took its place, so that it never becomes ready.
        RunNotFound: if the server has no such run.
        TrinityError: if the server cannot be used, as for :func:`.subscribe`.
    """
    with anyio.move_on_after(deadline):
        return await _ready(run, step, kind, epoch, redis_url)
    why = "the server does not answer"
    # A second deadline: the server that did not answer may not answer now either.
    with anyio.move_on_after(_EXPLAINING):
        why = explain(await _state(run, redis_url), step)
    raise DeadlineExceeded(
        f"the {kind} of step {step} of run {run} was not ready", deadline or 0.0, why
    )


async def _ready(
    run: str, step: int, kind: Kind, epoch: int | None, redis_url: str | None
) -> StepReady:
    state = await _state(run, redis_url)

    def matches(event: StepReady | StepSuperseded) -> bool:
        if (event.step, event.kind) != (step, kind):
            return False
        if epoch is not None:
            return event.epoch == epoch
        # A step of an abandoned branch has the same number, and other weights.
        return event.epoch > state.epoch or is_in_lineage(state, StepRef(event.epoch, step))

    # From the beginning: the step may be ready already.
    subscription = subscribe(run, StepReady, StepSuperseded, start="beginning", redis_url=redis_url)
    async with subscription as events:
        async for delivered in events:
            event = delivered.event
            if isinstance(event, StepReady) and matches(event):
                return event
            if isinstance(event, StepSuperseded) and matches(event):
                raise StepNotReady(run, step, kind, event.by.step)
    raise AssertionError("a subscription ends with an error alone")


async def newest_checkpoint(
    run: str, *, redis_url: str | None = None, checkpoint_root: Path | str | None = None
) -> ReadyCheckpoint | None:
    """Return the newest checkpoint that is ready; None if the run has none.

    Read it within :func:`~trinity_events.hold_checkpoint`, so that the reducer keeps it.

    Raises RunNotFound, ServerUnreachable, ServerTooOld, InvalidUrl or PermissionDenied.
    """
    pointer = (await _state(run, redis_url)).ready.get("checkpoint")
    if pointer is None or not pointer.has_folder:
        return None
    root = Path(checkpoint_root or trinity_home() / "checkpoints")
    at = pointer.at
    return ReadyCheckpoint(at.epoch, at.step, root / run / final_name(at.step))


async def _state(run: str, redis_url: str | None) -> MonitorState:
    with serving(redis_url) as url:
        async with connect(url) as client:
            await require_run(client, run)
            return await current_state(RedisEventLog(client, run))
