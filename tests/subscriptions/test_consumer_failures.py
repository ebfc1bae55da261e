"""Consumers that crash, hang, come too late or back again; and servers that do."""

import re
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import anyio
import pytest

from tests.support.errors import raises
from tests.support.event_histories import started
from tests.support.faulty_proxy import Proxy, command
from tests.support.redis_servers import servers
from tests.support.waits import PATIENCE
from trinity_events import subscribe
from trinity_events.errors import DeadlineExceeded, EntriesLost, GroupDetached
from trinity_events.log import AsyncPublisher, MemoryEventLog, RedisEventLog, Stream, new_producer
from trinity_events.server import SOCKET_DEADLINE, connect
from trinity_events.subscriptions import SubscriptionTimeouts, subscription_on
from trinity_schemas import ConsumerDetached, SaveStarted

pytestmark = pytest.mark.server

SOON = 0.05


def using(log, run_id, subscribe_here):
    """A run with a trainer and a leader's token, and how to subscribe to what is published."""
    return SimpleNamespace(
        id=run_id,
        log=log,
        trainer=AsyncPublisher(log, 1, new_producer("trainer")),
        reducer=AsyncPublisher(log, 1, new_producer("reducer")),
        subscribe=subscribe_here,
    )


@pytest.fixture(params=["memory", "redis"])
async def run(request, run_id):
    options = {"start": "beginning", "deadline": PATIENCE}
    if request.param == "memory":
        log = MemoryEventLog(run_id)
        here = partial(subscription_on, lambda: nullcontext(log), run_id, SaveStarted)
        yield using(log, run_id, partial(here, group=None, claim_after=60.0, **options))
        return
    url = request.getfixturevalue("redis_url")
    async with connect(url) as client:
        here = partial(subscribe, run_id, SaveStarted, redis_url=url, **options)
        yield using(RedisEventLog(client, run_id), run_id, here)


async def publish(run, steps):
    return [await run.trainer.publish(started(step)) for step in steps]


async def next_event(events):
    with anyio.fail_after(PATIENCE):
        return await anext(aiter(events))


def step_of(delivered):
    return delivered.event.slot.step


async def crash(run, count=1, **options):
    """A member that is given events and goes without a word."""
    async with run.subscribe(group="eval", **options) as events:
        return [step_of(await next_event(events)) for _ in range(count)]


async def group_of(run):
    [group] = await run.log.groups(Stream.EVENTS)
    return group


async def test_what_a_crashed_member_left_is_taken_over_once(run):
    """Invariant 2 of group_member.py."""
    await publish(run, range(4))
    assert await crash(run, 4) == [0, 1, 2, 3]
    await anyio.sleep(2 * SOON)
    steps = []

    async def take_over():
        async with run.subscribe(group="eval", claim_after=5.0, deadline=0.3) as events:
            with suppress(DeadlineExceeded):
                steps.extend([step_of(event) async for event in events])

    # By one that has little patience, and not by others who wait for as long as it takes.
    async with run.subscribe(group="eval", claim_after=SOON) as events:
        for _ in range(4):
            event = await next_event(events)
            steps.append(step_of(event))
            await event.ack()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take_over)
            tasks.start_soon(take_over)
    assert steps == [0, 1, 2, 3]
    assert (await group_of(run)).pending == 0


async def test_a_poison_event_goes_to_the_dead_letters_and_the_group_goes_on(run):
    """Invariant 3 of group_member.py."""
    [poison, _] = await publish(run, [13, 14])
    for _ in range(3):
        assert await crash(run, claim_after=SOON, max_deliveries=3) == [13]
        await anyio.sleep(2 * SOON)
    async with run.subscribe(group="eval", claim_after=SOON, max_deliveries=3) as events:
        event = await next_event(events)
        await event.ack()
    assert step_of(event) == 14
    [letter] = await run.log.dead_letters()
    assert letter.entry.id == poison
    assert letter.reason == "group eval: delivered 3 times and never acknowledged"
    assert (await group_of(run)).pending == 0


async def test_a_member_has_one_event_at_a_time_and_the_others_have_the_rest(run):
    """Invariant 1 of group_member.py."""
    await publish(run, range(3))
    async with (
        run.subscribe(group="eval") as slow,
        run.subscribe(group="eval") as quick,
    ):
        assert step_of(await next_event(slow)) == 0
        rest = [await next_event(quick) for _ in range(2)]
        for event in rest:
            await event.ack()
        assert [step_of(event) for event in rest] == [1, 2]


async def test_members_that_are_gone_are_forgotten(run):
    await publish(run, range(4))
    for _ in range(3):
        async with run.subscribe(group="eval") as events:
            await (await next_event(events)).ack()
    assert (await group_of(run)).members == 3
    await anyio.sleep(2 * SOON)
    member = subscription_on(
        lambda: nullcontext(run.log),
        run.log.run_id,
        SaveStarted,
        start="beginning",
        group="eval",
        deadline=PATIENCE,
        claim_after=60.0,
        timeouts=SubscriptionTimeouts(forget_after=SOON),
    )
    async with member as events:
        await (await next_event(events)).ack()
    assert (await group_of(run)).members <= 2  # this one, and the last that asked before


async def test_events_that_nobody_wants_leave_nothing_pending(run):
    """Invariant 4 of group_member.py."""
    await run.trainer.publish(ConsumerDetached(group="other", stream="events", position="1-0"))
    await publish(run, [7])
    async with run.subscribe(group="eval") as events:
        event = await next_event(events)
        assert step_of(event) == 7
        await event.ack()
    assert (await group_of(run)).pending == 0


# --- groups that are gone --------------------------------------------------------------------


async def detach(run, *, reports_pending=True):
    """As the leading reducer does it: say it, then do it; an older one told no oldest pending."""
    token, _ = await run.log.lead(60)
    group = await group_of(run)
    await run.reducer.publish(
        ConsumerDetached(
            group="eval",
            stream="events",
            position=group.last_delivered,
            pending=group.pending,
            idle=86400.0,
            oldest_pending=group.oldest_pending if reports_pending else None,
        )
    )
    assert await run.log.destroy_group(Stream.EVENTS, "eval", token=token)
    assert await run.log.renew(token, 0)


async def take_and_ack(run, count=1, **options):
    steps = []
    async with run.subscribe(group="eval", **options) as events:
        for _ in range(count):
            event = await next_event(events)
            steps.append(step_of(event))
            await event.ack()
    return steps


async def test_a_group_that_comes_back_goes_on_where_it_was_if_all_is_there(run):
    await publish(run, range(3))
    assert await take_and_ack(run, 2) == [0, 1]
    await detach(run)
    await publish(run, [3])
    assert await take_and_ack(run, 2, start="current") == [2, 3]


async def test_a_member_of_a_group_that_was_detached_is_told_and_never_hangs(run):
    entries = await publish(run, range(2))
    async with run.subscribe(group="eval", deadline=None) as events:
        await next_event(events)
        await detach(run)
        with raises(GroupDetached, run_id=run.id, group="eval", fault="gone", after=entries[0]):
            await next_event(events)


async def test_a_group_that_comes_back_is_given_again_what_it_never_acknowledged(run):
    await publish(run, range(4))
    async with run.subscribe(group="eval") as events:
        given = [await next_event(events) for _ in range(3)]
        await given[0].ack()
        await given[2].ack()
    await detach(run)
    assert await take_and_ack(run, 3) == [1, 2, 3]


async def test_nothing_is_called_lost_that_is_on_the_server(run):
    entries = await publish(run, range(3))
    assert await crash(run, 2) == [0, 1]
    await detach(run, reports_pending=False)
    last = entries[1]
    with raises(GroupDetached, fault="pending", pending=2, after=last, resume=last):
        await take_and_ack(run)
    assert await take_and_ack(run, 3, start="0-0") == [0, 1, 2]


async def test_a_group_is_told_when_what_it_never_acknowledged_is_gone(run):
    entries = await publish(run, range(4))
    assert await crash(run, 3) == [0, 1, 2]
    await detach(run)
    await run.log.trim(Stream.EVENTS, entries[1])
    with raises(GroupDetached, fault="trimmed", pending=3, stream="events") as caught:
        await take_and_ack(run)
    assert await take_and_ack(run, 3, start=caught.value.resume) == [1, 2, 3]


async def test_a_group_that_missed_events_is_told_from_where_and_can_go_on(run):
    """Invariant 5 of group_member.py."""
    entries = await publish(run, range(5))
    assert await take_and_ack(run) == [0]
    await detach(run)
    await run.log.trim(Stream.EVENTS, entries[3])
    for start in ("current", "beginning"):
        lost = {"run_id": run.id, "fault": "trimmed", "idle": 86400, "after": entries[0]}
        with raises(GroupDetached, **lost, pending=0) as caught:
            await take_and_ack(run, start=start)
    assert await take_and_ack(run, 2, start=caught.value.resume) == [3, 4]


async def test_a_group_whose_server_lost_it_is_told(redis_url, run_id):
    async with connect(redis_url) as client:
        here = partial(subscribe, run_id, SaveStarted, redis_url=redis_url, start="beginning")
        run = using(RedisEventLog(client, run_id), run_id, here)
        [first] = await publish(run, [0])
        async with run.subscribe(group="eval") as events:
            await (await next_event(events)).ack()
            await client.delete(run.log.keys.events)
            with raises(GroupDetached, fault="gone", after=first):
                await next_event(events)


AWAY = re.compile("does not answer")


# --- followers whose place is gone -----------------------------------------------------------


async def test_a_follower_whose_start_was_trimmed_is_told_where_the_rest_is(run):
    entries = await publish(run, range(5))
    await run.log.trim(Stream.EVENTS, entries[3])
    async with run.subscribe(start=entries[0]) as events:
        with raises(EntriesLost, run_id=run.id, fault="trimmed", after=entries[0]) as caught:
            await next_event(events)
    goes_on = caught.value.resume
    for start, remaining_steps in ((goes_on, [3, 4]), (entries[3], [4]), ("beginning", [3, 4])):
        async with run.subscribe(start=start) as events:
            assert [step_of(await next_event(events)) for _ in remaining_steps] == remaining_steps


async def test_a_group_is_not_created_where_entries_are_missing(run):
    entries = await publish(run, range(3))
    await run.log.trim(Stream.EVENTS, entries[2])
    with raises(EntriesLost, fault="trimmed", after=entries[0]):
        await take_and_ack(run, start=entries[0])
    assert await run.log.groups(Stream.EVENTS) == []


async def test_a_follower_that_is_overtaken_by_the_trimming_is_told(run):
    await publish(run, [0])
    async with run.subscribe() as events:
        assert step_of(await next_event(events)) == 0
        entries = await publish(run, range(1, 4))
        await run.log.trim(Stream.EVENTS, entries[2])
        await anyio.sleep(0.2)
        with raises(EntriesLost, fault="trimmed"):
            await next_event(events)


async def test_a_follower_that_read_all_does_not_mind_the_trimming(run):
    entries = await publish(run, range(3))
    async with run.subscribe() as events:
        for _ in entries:
            await next_event(events)
        await run.log.trim(Stream.EVENTS, entries[2])
        await anyio.sleep(0.2)
        await publish(run, [3])
        assert step_of(await next_event(events)) == 3


async def test_a_start_beyond_the_end_of_the_log_is_told(run):
    [only] = await publish(run, [0])
    async with run.subscribe(start="9999999999999-0") as events:
        with raises(EntriesLost, fault="shortened", end=only, after="9999999999999-0"):
            await next_event(events)


# --- servers that go away --------------------------------------------------------------------


@asynccontextmanager
async def run_on(url):
    async with connect(url) as client:
        here = partial(
            subscribe, "run", SaveStarted, redis_url=url, start="beginning", wait_for_run=True
        )
        yield using(RedisEventLog(client, "run"), "run", partial(here, deadline=PATIENCE))


@pytest.mark.parametrize("group", [None, "eval"])
async def test_a_subscription_outlives_a_restart_of_its_server(tmp_path, group):
    with servers(tmp_path, 1) as [server]:
        async with run_on(server.url) as run, run.subscribe(group=group) as events:
            await publish(run, [0])
            first = await next_event(events)
            server.kill()

            async def restart():
                await anyio.sleep(0.2)
                await anyio.to_thread.run_sync(server.start)
                await publish(run, [1])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(restart)
                await first.ack()
                assert step_of(await next_event(events)) == 1


@pytest.mark.parametrize("group", [None, "eval"])
async def test_a_server_that_stays_away_is_named_when_the_deadline_passes(tmp_path, group):
    with servers(tmp_path, 1) as [server]:
        async with run_on(server.url) as run, run.subscribe(group=group, deadline=3.0) as events:
            await publish(run, [0])
            event = await next_event(events)
            server.kill()
            with raises(DeadlineExceeded, missing="no save-started of run run came", deadline=3):
                await next_event(events)
            if group is not None:
                missing = f"{event.entry_id} of run run was not acknowledged to eval"
                with raises(DeadlineExceeded, missing=missing, deadline=3, reason=AWAY):
                    await event.ack()


@pytest.mark.parametrize("group", [None, "eval"])
async def test_a_server_that_hangs_holds_nobody_beyond_the_deadline(redis_url, run_id, group):
    with Proxy(redis_url) as proxy:
        options = {"redis_url": proxy.url, "group": group, "deadline": 0.2, "wait_for_run": True}
        async with subscribe(run_id, SaveStarted, **options) as events:
            proxy.swallow()
            in_time = anyio.fail_after(0.8 * SOCKET_DEADLINE)  # which would end it too
            with in_time, raises(DeadlineExceeded, reason=AWAY):
                await next_event(events)
        proxy.heal()


async def test_what_was_given_in_a_lost_reply_is_taken_over(redis_url, run_id):
    with Proxy(redis_url) as proxy:
        async with connect(redis_url) as client:
            here = partial(subscribe, run_id, SaveStarted, redis_url=proxy.url, deadline=PATIENCE)
            run = using(RedisEventLog(client, run_id), run_id, here)
            await publish(run, [0])
            fault = proxy.cut("after", command("XREADGROUP"))
            options = {"group": "eval", "start": "beginning", "claim_after": SOON}
            async with run.subscribe(**options) as events:
                event = await next_event(events)
                assert step_of(event) == 0
                assert fault.struck.is_set()
                cut_ack = proxy.cut("after", command("XACK"))
                await event.ack()
                assert cut_ack.struck.is_set()
            assert (await group_of(run)).pending == 0


async def test_a_follower_that_was_cut_off_misses_nothing_and_sees_nothing_twice(redis_url, run_id):
    with Proxy(redis_url) as proxy:
        async with connect(redis_url) as client:
            here = partial(subscribe, run_id, SaveStarted, redis_url=proxy.url, deadline=PATIENCE)
            run = using(RedisEventLog(client, run_id), run_id, here)
            await publish(run, range(3))
            for place in ("before", "within", "after"):
                proxy.cut(place, command("XREAD"), nth=2)
            async with run.subscribe(start="beginning") as events:
                assert [step_of(await next_event(events)) for _ in range(3)] == [0, 1, 2]
                await publish(run, [3])
                assert step_of(await next_event(events)) == 3


@pytest.mark.parametrize("more", [0, 1])
async def test_a_failover_that_lost_the_end_is_told_to_followers(tmp_path, more):
    with servers(tmp_path, 2, "--repl-diskless-sync-delay", "0") as [old, new]:
        async with run_on(old.url) as run, run.subscribe() as events:
            with new.client() as replica:
                replica.replicaof("127.0.0.1", old.port)
                ids = await publish(run, range(2))
                with anyio.fail_after(PATIENCE):
                    while replica.xlen(run.log.keys.events) < 2:
                        await anyio.sleep(0.01)
                replica.replicaof("NO", "ONE")
            [lost] = await publish(run, [2])
            assert [step_of(await next_event(events)) for _ in range(3)] == [0, 1, 2]
            old.kill()
            with new.client() as promoted:
                promoted.config_set("port", old.port)  # as an address that is moved to it
            if more:
                [lost_or_new] = await publish(run, [3])
                says = {"fault": "rewritten", "end": lost_or_new}
            else:
                says = {"fault": "shortened", "end": ids[1]}
            await anyio.sleep(0.2)
            with raises(EntriesLost, after=lost, **says):
                await next_event(events)
        async with run.subscribe(start=ids[1], deadline=PATIENCE if more else 0.2) as events:
            if more:
                assert step_of(await next_event(events)) == 3
            else:
                with pytest.raises(DeadlineExceeded):
                    await next_event(events)
