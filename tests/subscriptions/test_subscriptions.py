"""Subscriptions and a real reducer, on a real server and on the twin in memory."""

from functools import partial
from types import SimpleNamespace

import anyio
import pytest

from tests.support.errors import raises
from tests.support.event_histories import committed, registration, started
from tests.support.pipeline import announced, publish_steps, reducer_task, until
from tests.support.waits import PATIENCE
from trinity_events import StepReady, VersionRetired, subscribe
from trinity_events.errors import DeadlineExceeded, RunNotFound
from trinity_events.log import (
    ORIGIN,
    AsyncPublisher,
    RedisEventLog,
    Stream,
    new_producer,
    open_run,
    position,
    stream_order,
)
from trinity_events.server import connect
from trinity_events.subscriptions.subscription import InvalidSubscription, SubscriptionNotOpen
from trinity_events.testing import Pipeline
from trinity_schemas import (
    EVENT_TYPES,
    Envelope,
    RunOpened,
    SaveStarted,
    StepFailed,
    decode_envelope,
    encode,
)

pytestmark = pytest.mark.server


@pytest.fixture(params=["memory", "redis"])
async def run(request, run_id):
    """A run that is reduced: its log, its trainer, and how to subscribe to it and resume it."""
    if request.param == "memory":
        async with Pipeline(run_id) as twin:

            async def resume(step):
                await twin.resume(step)
                return twin.publisher("trainer")

            yield SimpleNamespace(
                log=twin.log,
                trainer=twin.publisher("trainer"),
                subscribe=twin.subscribe,
                resume=resume,
            )
        return
    url = request.getfixturevalue("redis_url")
    async with connect(url) as client:
        log = RedisEventLog(client, run_id)

        async def open_epoch(step=None):
            epoch = await open_run(client, run_id, resume_from=step)
            return AsyncPublisher(log, epoch, new_producer("trainer"))

        trainer = await open_epoch()
        async with reducer_task(url, run_id):
            yield SimpleNamespace(
                log=log,
                trainer=trainer,
                subscribe=partial(subscribe, run_id, redis_url=url),
                resume=open_epoch,
            )


async def take(subscription, count):
    with anyio.fail_after(PATIENCE):
        return [(await anext(aiter(subscription))) for _ in range(count)]


async def test_a_follower_from_the_beginning_sees_everything_in_order(run):
    await publish_steps(run.trainer, range(3))
    async with run.subscribe(StepReady, start="beginning") as events:
        assert [event.step for event in await take(events, 3)] == [0, 1, 2]


async def test_a_follower_from_current_sees_the_state_now_then_what_comes(run):
    await publish_steps(run.trainer, range(3))
    await run.trainer.publish(committed(1, "state_dict", registration(expected=0)))
    await announced(run.log, 5)
    async with run.subscribe(StepReady) as events:
        assert [(event.kind, event.step) for event in await take(events, 2)] == [
            ("weights", 2),
            ("state_dict", 1),
        ]
        await publish_steps(run.trainer, [3])
        assert [(event.kind, event.step) for event in await take(events, 1)] == [("weights", 3)]


async def test_what_a_resume_went_back_behind_is_not_current(run):
    await run.trainer.publish(committed(105, "checkpoint", registration("checkpoint", 0)))
    await publish_steps(run.trainer, [105])
    await announced(run.log, 2)
    resumed = await run.resume(100)
    await resumed.publish(committed(101, "state_dict", registration(expected=0)))
    await announced(run.log, 3)
    async with run.subscribe(StepReady) as events:
        assert [(event.kind, event.step) for event in await take(events, 2)] == [
            ("weights", 105),  # the newest there are, until the resumed trainer publishes
            ("state_dict", 101),
        ]


async def test_a_follower_goes_on_from_a_position(run):
    await publish_steps(run.trainer, range(3))
    async with run.subscribe(StepReady, start=ORIGIN) as events:
        first, *_ = await take(events, 3)
    async with run.subscribe(StepReady, start=first.entry_id) as events:
        assert [event.step for event in await take(events, 2)] == [1, 2]


@pytest.mark.parametrize("group", [None, "eval"])
async def test_a_position_may_be_of_the_other_stream(run, group):
    await publish_steps(run.trainer, [1])
    await announced(run.log, 1)
    await anyio.sleep(0.002)  # ids of one millisecond have no order between the streams
    newest = await run.trainer.publish(started(2))  # as tail prints it: nothing is announced of it

    async def go_on():
        await anyio.sleep(0.2)
        await publish_steps(run.trainer, [3])

    subscribed = run.subscribe(StepReady, start=newest, group=group)
    async with subscribed as events, anyio.create_task_group() as tasks:
        tasks.start_soon(go_on)
        assert [event.step for event in await take(events, 1)] == [3]


async def test_every_follower_sees_every_event(run):
    await publish_steps(run.trainer, range(3))
    for _ in range(2):
        async with run.subscribe(StepReady, start="beginning") as events:
            assert len(await take(events, 3)) == 3


async def test_only_the_types_asked_for_are_delivered(run):
    await publish_steps(run.trainer, range(4))
    async with run.subscribe(VersionRetired, StepFailed, start="beginning") as events:
        [retired, _] = await take(events, 2)
    assert isinstance(retired.event, VersionRetired)
    assert (retired.step, retired.envelope.run_id) == (0, run.log.run_id)


async def test_workers_events_can_be_subscribed_to(run):
    await run.trainer.publish(started(4))
    async with run.subscribe(SaveStarted, start="beginning") as events:
        [event] = await take(events, 1)
    assert event.slot.step == 4


async def test_a_group_shares_the_events_among_its_members(run):
    await publish_steps(run.trainer, range(8))
    seen = []

    async def member():
        options = {"group": "eval", "start": "beginning", "deadline": PATIENCE}
        async with run.subscribe(StepReady, **options) as events:
            async for event in events:
                seen.append(event.step)
                await event.ack()
                await anyio.sleep(0.005)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(member)
        await until(lambda: len(seen) >= 8)
        await anyio.sleep(0.3)  # in which nobody is given what another has
        tasks.cancel_scope.cancel()
    assert sorted(seen) == list(range(8))


async def test_what_a_member_did_not_acknowledge_goes_to_another(run):
    await publish_steps(run.trainer, range(3))
    await announced(run.log, 4)
    options = {"group": "eval", "start": "beginning"}
    async with run.subscribe(StepReady, **options) as events:
        first, _, _ = await take(events, 3)
        await first.ack()
    async with run.subscribe(StepReady, claim_after=0.05, **options) as events:
        await anyio.sleep(0.1)
        assert [event.step for event in await take(events, 2)] == [1, 2]


async def test_a_group_from_current_begins_with_the_state_now(run):
    await publish_steps(run.trainer, range(3))
    await announced(run.log, 4)
    async with run.subscribe(StepReady, group="eval") as events:
        [event] = await take(events, 1)
        assert event.step == 2
        await event.ack()


async def test_a_deadline_says_what_did_not_come(run):
    name = run.log.run_id
    async with run.subscribe(StepReady, deadline=0.1) as events:
        with raises(DeadlineExceeded, missing=f"no step-ready of run {name} came", deadline=0.1):
            await anext(aiter(events))


async def test_a_run_that_is_yet_to_come_can_be_waited_for(redis_url, run_id):
    options = {"redis_url": redis_url, "wait_for_run": True}
    async with subscribe(run_id, StepReady, deadline=0.1, **options) as events:
        with pytest.raises(DeadlineExceeded):
            await anext(aiter(events))
    async with (
        subscribe(run_id, RunOpened, deadline=PATIENCE, **options) as events,
        connect(redis_url) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(open_run, client, run_id)
        [event] = await take(events, 1)
    assert event.envelope.run_id == run_id


@pytest.mark.parametrize("group", [None, "eval"])
async def test_a_mistyped_run_is_told_at_once_with_the_nearest_name(
    publisher, redis_url, run_id, group
):
    mistyped = f"{run_id[:-1]}_"
    with anyio.fail_after(PATIENCE), pytest.raises(RunNotFound) as caught:
        async with subscribe(mistyped, StepReady, redis_url=redis_url, group=group):
            pass
    assert str(caught.value) == (
        f"there is no run {mistyped!r} on this server (is {run_id} meant?): "
        "give wait_for_run=True to wait until it is opened"
    )


async def printed(log) -> list[tuple[str, bytes]]:
    """Every entry of both streams, in the order in which `tail` prints them."""
    entries = [(s, entry) for s in Stream for entry in await log.read(stream=s, limit=100_000)]
    return [(entry.id, entry.payload) for _, entry in sorted(entries, key=stream_order)]


@pytest.mark.parametrize("start", ["beginning", ORIGIN, "current"])
async def test_events_and_announcements_together_come_in_the_order_of_tail(run, start):
    """While they are published and announced, which is where the order could be lost."""
    before = len(await printed(run.log)) if start == "current" else 0
    async with run.subscribe(*EVENT_TYPES, start=start, deadline=PATIENCE) as events:
        heard = []

        async def listen():
            async for event in events:
                heard.append((event.entry_id, encode(event.envelope)))
                retired = isinstance(event.event, VersionRetired)
                if retired and event.event.step == 57:
                    return

        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen)
                await anyio.sleep(0.05)
                await publish_steps(run.trainer, range(60))
    expected = (await printed(run.log))[before:]
    assert len(heard) > 200
    assert heard == expected[: len(heard)]


async def test_a_page_that_is_full_loses_no_order(run):
    await publish_steps(run.trainer, range(60))
    await until(lambda: _announced_of(run.log, 59))
    expected = await printed(run.log)
    async with run.subscribe(*EVENT_TYPES, start="beginning") as events:
        delivered = await take(events, len(expected))
    assert [(delivery.entry_id, encode(delivery.envelope)) for delivery in delivered] == expected


async def _announced_of(log, step):
    entries = await log.read(stream=Stream.ANNOUNCEMENTS, limit=1000)
    events = [decode_envelope(entry.payload).event for entry in entries]
    return any(isinstance(event, StepReady) and event.step == step for event in events)


async def test_both_go_on_from_any_entry_and_lose_none_of_one_id(client, redis_url, run_id):
    await open_run(client, run_id)
    log = RedisEventLog(client, run_id)
    payload = (await log.read())[0].payload
    later = f"{position(await log.last_id())[0] + 1}-0"
    announcement = Envelope(
        run_id=run_id,
        epoch=1,
        producer=new_producer("reducer"),
        sequence=1,
        occurred_at=1.0,
        event=VersionRetired(epoch=1, step=1),
    )
    await client.xadd(log.keys.events, {"e": payload}, id=later)
    await client.xadd(log.keys.announcements, {"e": encode(announcement)}, id=later)
    options = {"redis_url": redis_url, "deadline": PATIENCE}
    for start, expected in (
        ("beginning", [RunOpened, RunOpened, VersionRetired]),
        (later, [VersionRetired]),  # it is not known which of the two was given last
    ):
        async with subscribe(run_id, *EVENT_TYPES, start=start, **options) as events:
            delivered = await take(events, len(expected))
        assert [type(delivery.event) for delivery in delivered] == expected


async def test_other_events_do_not_put_a_deadline_off(publisher, redis_url, run_id):
    async def chatter():
        while True:
            await publisher.publish(committed(1, "state_dict"))
            await anyio.sleep(0.02)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(chatter)
        options = {"redis_url": redis_url, "start": "beginning", "deadline": 0.3}
        async with subscribe(run_id, SaveStarted, **options) as events:
            with anyio.fail_after(PATIENCE), pytest.raises(DeadlineExceeded):
                await anext(aiter(events))
        tasks.cancel_scope.cancel()


async def test_without_a_url_the_embedded_server_is_used(redis_url, publisher, run_id):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1])
        async with subscribe(run_id, StepReady, deadline=PATIENCE) as events:
            [event] = await take(events, 1)
    assert event.step == 1


async def test_a_subscription_that_nobody_opened_says_how_it_is_read():
    with raises(SubscriptionNotOpen, keyword="async with"):
        await anext(subscribe("run", StepReady))


def test_nonsense_is_refused_before_anything_is_connected():
    for refusing in (partial(subscribe, "run"), Pipeline("run").subscribe):
        with raises(InvalidSubscription, fault="streams"):
            refusing(StepReady, SaveStarted, group="eval")
        with raises(InvalidSubscription, fault="start", value="yesterday"):
            refusing(StepReady, start="yesterday")
        for kind in (dict, "StepReady"):
            with raises(InvalidSubscription, fault="type", value=kind):
                refusing(kind)
        for group in ("", "x" * 257):
            with raises(InvalidSubscription, fault="group", length=len(group)):
                refusing(group=group)
