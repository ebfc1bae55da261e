"""Subscriptions, against a real server and a real reducer."""

from contextlib import suppress

import anyio
import pytest

from tests.histories import committed, registration, started
from tests.pipeline import announced, publish_steps, reducer_task
from trinity_events import StepReady, VersionRetired, subscribe
from trinity_events.errors import DeadlineExceeded
from trinity_events.log import ORIGIN, AsyncPublisher, new_producer, open_run
from trinity_schemas import SaveStarted, StepFailed


@pytest.fixture
async def reduced(publisher, redis_url, run_id):
    async with reducer_task(redis_url, run_id):
        yield publisher


async def take(subscription, count):
    with anyio.fail_after(10):
        return [(await anext(aiter(subscription))) for _ in range(count)]


async def test_a_follower_from_the_beginning_sees_everything_in_order(reduced, redis_url, run_id):
    await publish_steps(reduced, range(3))
    async with subscribe(run_id, StepReady, redis_url=redis_url, start="beginning") as events:
        assert [one.step for one in await take(events, 3)] == [0, 1, 2]


async def test_a_follower_from_current_sees_the_state_now_then_what_comes(
    reduced, log, redis_url, run_id
):
    await publish_steps(reduced, range(3))
    await reduced.publish(committed(1, "state_dict", registration(expected=0)))
    await announced(log, 5)
    async with subscribe(run_id, StepReady, redis_url=redis_url) as events:
        assert [(one.kind, one.step) for one in await take(events, 2)] == [
            ("weights", 2),
            ("state_dict", 1),
        ]
        await publish_steps(reduced, [3])
        assert [(one.kind, one.step) for one in await take(events, 1)] == [("weights", 3)]


async def test_what_a_resume_went_back_behind_is_not_current(
    reduced, client, log, redis_url, run_id
):
    await reduced.publish(committed(105, "checkpoint", registration("checkpoint", 0)))
    await publish_steps(reduced, [105])
    await announced(log, 2)
    epoch = await open_run(client, run_id, resume_from=100)
    resumed = AsyncPublisher(log, epoch, new_producer("trainer"))
    await resumed.publish(committed(101, "state_dict", registration(expected=0)))
    await announced(log, 3)
    async with subscribe(run_id, StepReady, redis_url=redis_url) as events:
        assert [(one.kind, one.step) for one in await take(events, 2)] == [
            ("weights", 105),  # the newest there are, until the resumed trainer publishes
            ("state_dict", 101),
        ]


async def test_a_follower_goes_on_from_a_position(reduced, redis_url, run_id):
    await publish_steps(reduced, range(3))
    async with subscribe(run_id, StepReady, redis_url=redis_url, start=ORIGIN) as events:
        first, *_ = await take(events, 3)
    async with subscribe(run_id, StepReady, redis_url=redis_url, start=first.entry_id) as events:
        assert [one.step for one in await take(events, 2)] == [1, 2]


async def test_every_follower_sees_every_event(reduced, redis_url, run_id):
    await publish_steps(reduced, range(3))
    for _ in range(2):
        async with subscribe(run_id, StepReady, redis_url=redis_url, start="beginning") as events:
            assert len(await take(events, 3)) == 3


async def test_only_the_types_asked_for_are_delivered(reduced, redis_url, run_id):
    await publish_steps(reduced, range(4))
    types = (VersionRetired, StepFailed)
    async with subscribe(run_id, *types, redis_url=redis_url, start="beginning") as events:
        [retired, _] = await take(events, 2)
    assert isinstance(retired.event, VersionRetired)
    assert (retired.step, retired.envelope.run_id) == (0, run_id)


async def test_workers_events_can_be_subscribed_to(publisher, redis_url, run_id):
    await publisher.publish(started(4))
    async with subscribe(run_id, SaveStarted, redis_url=redis_url, start="beginning") as events:
        [event] = await take(events, 1)
    assert event.slot.step == 4


async def test_a_group_shares_the_events_among_its_members(reduced, redis_url, run_id):
    await publish_steps(reduced, range(8))
    seen = []

    async def member():
        options = {"group": "eval", "start": "beginning", "deadline": 0.3}
        async with subscribe(run_id, StepReady, redis_url=redis_url, **options) as events:
            with suppress(DeadlineExceeded):
                async for event in events:
                    seen.append(event.step)
                    await event.ack()
                    await anyio.sleep(0.005)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(member)
    assert sorted(seen) == list(range(8))


async def test_what_a_member_did_not_acknowledge_goes_to_another(reduced, log, redis_url, run_id):
    await publish_steps(reduced, range(3))
    await announced(log, 4)
    options = {"group": "eval", "start": "beginning", "redis_url": redis_url}
    async with subscribe(run_id, StepReady, **options) as events:
        first, _, _ = await take(events, 3)
        await first.ack()
    async with subscribe(run_id, StepReady, claim_after=0.05, **options) as events:
        await anyio.sleep(0.1)
        assert [one.step for one in await take(events, 2)] == [1, 2]


async def test_a_group_from_current_begins_with_the_state_now(reduced, log, redis_url, run_id):
    await publish_steps(reduced, range(3))
    await announced(log, 4)
    async with subscribe(run_id, StepReady, group="eval", redis_url=redis_url) as events:
        [event] = await take(events, 1)
        assert event.step == 2
        await event.ack()


async def test_a_deadline_says_what_did_not_come(redis_url, run_id):
    async with subscribe(run_id, StepReady, redis_url=redis_url, deadline=0.1) as events:
        with pytest.raises(DeadlineExceeded, match=f"no step-ready of run {run_id} came within"):
            await anext(aiter(events))


async def test_without_a_url_the_embedded_server_is_used(redis_url, reduced, run_id):
    await publish_steps(reduced, [1])
    async with subscribe(run_id, StepReady, deadline=10) as events:
        [event] = await take(events, 1)
    assert event.step == 1


def test_nonsense_is_refused_before_anything_is_connected():
    with pytest.raises(ValueError, match="not to both at once"):
        subscribe("run", StepReady, SaveStarted)
    with pytest.raises(ValueError, match=r"start at .*'yesterday' is not an entry id"):
        subscribe("run", StepReady, start="yesterday")
    with pytest.raises(ValueError, match="is not an event"):
        subscribe("run", dict)
