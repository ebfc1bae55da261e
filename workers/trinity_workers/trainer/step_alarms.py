"""Alarms of a trainer: its steps, the pace of the one under way, and the transfers of weights."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

import anyio
from msgspec import structs

from trinity_events.core.alarms import SHORTEST_STALL, AlarmJudge
from trinity_events.diagnostics.phases import PhaseClock
from trinity_events.subscriptions import subscribe
from trinity_schemas import AlarmCleared, AlarmRaised, WeightsApplied

from ..config.train_config import RunConfig

Publish = Callable[[AlarmRaised | AlarmCleared], Awaitable[object]]


class StepAlarms:
    """Judge of a trainer's steps, which publishes the alarms of its epoch.

    Args:
        config: The run.
        publish: Publishes an event.
        clock: Phases of the trainer.
        now: Clock in seconds, which is never set back.
        shortest_stall: Seconds below which no step is stalled.
    """

    def __init__(
        self,
        config: RunConfig,
        publish: Publish,
        clock: PhaseClock,
        now: Callable[[], float] = time.monotonic,
        shortest_stall: float = SHORTEST_STALL,
    ) -> None:
        self._config = config
        self._publish = publish
        self._clock = clock
        self._now = now
        self._judge = AlarmJudge(structs.asdict(config.alarms), shortest_stall=shortest_stall)
        self._step = 0
        self._began: float | None = None
        """Time of the last step's end."""
        self._stepped = anyio.Event()

    async def add_step(self, step: int, metrics: dict[str, float]) -> None:
        """Judge a trained step, and publish what it raises and clears."""
        now = self._now()
        seconds = None if self._began is None else now - self._began
        self._step, self._began = step, now
        for event in self._judge.judge_step(step, metrics, seconds):
            await self._publish(event)
        self._stepped.set()
        # Replaced, since an event of anyio cannot be cleared.
        self._stepped = anyio.Event()

    async def watch_pace(self) -> None:
        """Raise an alarm on each step that takes far longer than those before it."""
        # After the last step the trainer waits for saves and evaluations.
        while self._step < self._config.steps:
            stepped, bound = self._stepped, self._judge.stalled_after
            passed = 0.0 if self._began is None else self._now() - self._began
            with anyio.move_on_after(math.inf if bound is None else bound - passed):
                await stepped.wait()
                continue
            phase = self._clock.report().phase
            # The timer may be early by the last bit of its clock.
            seconds = max(self._now() - (self._began or 0.0), bound or 0.0)
            alarm = self._judge.judge_stall(self._step + 1, seconds, phase)
            if alarm is not None:
                await self._publish(alarm)
            await stepped.wait()

    async def watch_transfers(self) -> None:
        """Judge the rate at which explorers get the weights of this epoch."""
        config = self._config
        async with subscribe(config.run_id, WeightsApplied, redis_url=config.redis_url) as events:
            async for delivered in events:
                applied = delivered.event
                if applied.version.epoch != config.epoch:
                    continue
                producer = delivered.envelope.producer
                event = self._judge.judge_transfer(
                    *(applied.version.step, f"{producer.role}-{producer.rank}"),
                    *(applied.bytes, applied.phases.fetch),
                )
                if event is not None:
                    await self._publish(event)
