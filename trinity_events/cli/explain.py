"""``trinity-events explain``."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from ..core import MonitorState
from ..core import explain as in_words
from ..errors import TrinityError
from ..history import current_state
from ..log import RedisEventLog, require_run
from ..server import server_clock
from ..views.terminal import say
from .options import Json, RedisUrl, RunArgument, client_of, print_json


class StepNotFound(TrinityError):
    """Nothing is known of the step."""


def explain(
    run: RunArgument,
    step: Annotated[int, typer.Argument(min=0, help="The training step.", show_default=False)],
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Say why a step is not ready: who is missing, and since when.

    Example: trinity-events explain demo-1 100
    """
    state, now = anyio.run(_state, redis_url, run)
    found = state.steps.get(step)
    if found is None and step > state.forgotten_through:
        newest = f"its newest step is {max(state.steps)}" if state.steps else "it has no step yet"
        raise StepNotFound(
            f"nothing is known of step {step} in epoch {state.epoch} of run {state.run_id}: "
            f"{newest} (see trinity-events status {state.run_id})"
        )
    said = in_words(state, step, now=now, named=None)
    if not as_json:
        say(said, lines=False)
        return
    kinds = {} if found is None else found.kinds
    outcomes = {
        kind: one.outcome or ("failed" if one.failure else "waiting") for kind, one in kinds.items()
    }
    print_json(
        {
            "run_id": state.run_id,
            "epoch": state.epoch,
            "step": step,
            "kinds": outcomes,
            "explanation": said,
        }
    )


async def _state(redis_url: str | None, run: str) -> tuple[MonitorState, int]:
    """The run's state, and the time by the server's clock."""
    async with client_of(redis_url) as client:
        log = RedisEventLog(client, await require_run(client, run))
        return await current_state(log), await server_clock(client, log.keys.events)
