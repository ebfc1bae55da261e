"""Unit test of a job that evaluates every weight version, without a server and torch."""

import asyncio
from collections.abc import Callable

from trinity_events import StepReady, Subscription
from trinity_events.testing import Pipeline


async def evaluate(
    subscribe: Callable[..., Subscription[StepReady]], score: Callable[[int], float], last: int
) -> dict[int, float]:
    """Score versions. In production: subscribe = partial(trinity_events.subscribe, RUN)."""
    scores = {}
    async with subscribe(StepReady, group="eval", start="beginning") as events:
        async for event in events:
            if event.kind == "weights":
                scores[event.step] = score(event.step)
            await event.ack()
            if event.step >= last:
                break
    return scores


def test_every_version_is_evaluated_once(trinity_pipeline: Pipeline) -> None:
    """Evaluate three steps on the in-memory pipeline, whose fixture comes with trinity-events."""

    async def scenario() -> None:
        async with trinity_pipeline as run:
            job = asyncio.create_task(evaluate(run.subscribe, lambda step: step / 10, last=3))
            for step in (1, 2, 3):
                await run.make_ready(step)
            assert await job == {1: 0.1, 2: 0.2, 3: 0.3}

    asyncio.run(scenario())
