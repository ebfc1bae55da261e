"""A dispatcher whose call is cancelled at any boundary goes on as if the call had been late."""

import anyio
import pytest

from tests.support.rollout_histories import count_raw
from tests.support.rollout_parts import Parts, samples_of
from tests.support.waits import PATIENCE
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer
from trinity_schemas import RunKeys


class Canceller:
    """Cancels a scope at the nth call to the server, before or after the server has done it."""

    def __init__(self, nth: int, place: str) -> None:
        self.countdown, self.place = nth, place
        self.scope = anyio.CancelScope()

    async def __call__(self, call):
        self.countdown -= 1
        is_nth = self.countdown == 0  # another call may begin before the reply to this one
        if is_nth and self.place == "before":
            await self.cancel()
        try:
            return await call()
        finally:  # the reply may be an error
            if is_nth and self.place == "after":
                await self.cancel()

    async def cancel(self):
        self.scope.cancel()
        await anyio.sleep(PATIENCE)


class WatchedLog(RedisEventLog):
    """Log whose writer may be cancelled."""

    canceller: Canceller

    async def append(self, *args):
        return await self.canceller(lambda: super(WatchedLog, self).append(*args))


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("nth", range(1, 9))
async def test_no_ordinal_is_lost_or_asked_for_twice(client, publisher, run_id, nth, place):
    canceller = Canceller(nth, place)
    log = WatchedLog(client, run_id)
    log.canceller = canceller
    watched = AsyncPublisher(log, publisher.epoch, new_producer("trainer"))
    parts = Parts(client, watched, run_id)
    dispatcher = await parts.dispatcher()
    ask = dispatcher._streams.retry
    dispatcher._streams.retry = lambda wait, question, **more: canceller(
        lambda: ask(wait, question, **more)
    )
    executed = []

    async def explore():
        explorer = parts.explorer()
        while True:
            for claim in await explorer.claim(8, seconds=0.01):
                # Before the answer: the last one may end this task.
                executed.append(claim.request.ordinal)
                assert await explorer.answer(claim, samples_of(claim, explorer.name))

    def usable(group):
        return True if group.attempt > 1 else "stale"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(explore)
        with canceller.scope:
            await dispatcher.dispatch(3, parts.version)
            await dispatcher.take(2, deadline=PATIENCE, usable=usable)
            pytest.fail("the call was never cancelled")
        await dispatcher.dispatch(0, parts.version)
        groups = await dispatcher.take(3, deadline=PATIENCE, usable=usable)
        tasks.cancel_scope.cancel()
    await dispatcher.trained(1, groups)
    assert [(group.ordinal, group.attempt) for group in groups] == [(0, 2), (1, 2), (2, 2)]
    assert sorted(executed) == [0, 0, 1, 1, 2, 2], "no attempt was executed twice"
    entries = await client.xrange(RunKeys.of(run_id).events)
    [count] = count_raw(fields[b"e"] for _, fields in entries)
    assert (count.wrong, count.open, count.next) == ([], [], dispatcher.ledger.next)
    assert await client.xlen(RunKeys.of(run_id).rollouts) == 0
    assert await client.xlen(RunKeys.of(run_id).experiences) == 0
