"""The trainer's alarms follow its steps: a step that stalls is reported while it is under way."""

import anyio
import pytest

from trinity_events.diagnostics.phases import PhaseClock
from trinity_schemas import AlarmCleared, AlarmRaised
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.trainer.step_alarms import StepAlarms


@pytest.mark.parametrize("steps", [6, 100])
async def test_a_step_that_stalls_is_reported_once_before_its_end_and_none_after_the_last(steps):
    now, published, raised = [0.0], [], anyio.Event()

    async def publish(event):
        published.append(event)
        raised.set()

    clock = PhaseClock()
    clock.end_start()
    alarms = StepAlarms(
        TrainConfig(steps=steps), publish, clock, lambda: now[0], shortest_stall=0.02
    )
    async with anyio.create_task_group() as tasks:
        for step in range(1, 7):
            await alarms.add_step(step, {})
            now[0] += 0.001
        with clock.phase("waiting-rollouts"):
            tasks.start_soon(alarms.watch_pace)
            if steps == 6:
                return  # the watch has ended: the group would wait for it
            now[0] += 0.03
            with anyio.fail_after(30):
                await raised.wait()
        now[0] += 9.0
        await alarms.add_step(7, {})
        tasks.cancel_scope.cancel()
    [stalled, cleared] = published
    assert isinstance(stalled, AlarmRaised) and stalled.alarm == "stalled_step"
    assert (stalled.step, cleared) == (7, AlarmCleared(alarm="stalled_step", step=7))
    assert "waiting-rollouts" in stalled.sentence
