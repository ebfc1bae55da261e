"""Time as the leading reducer tells it: leases, deadlines and consumers that are gone."""

from contextlib import nullcontext
from functools import partial

import anyio
import pytest

from tests.support.errors import raises
from tests.support.event_histories import History, committed, finished, registration, slot
from tests.support.pipeline import announced, events_of, publish_steps, reducer_task, until
from tests.support.redis_servers import servers
from tests.support.waits import PATIENCE
from trinity_events import subscribe
from trinity_events.core import MonitorState
from trinity_events.core.limits import EXPIRED_AT_ONCE
from trinity_events.log import (
    AsyncPublisher,
    MemoryEventLog,
    RedisEventLog,
    Stream,
    new_producer,
    open_run,
)
from trinity_events.reducer import InvalidPolicy, Policy, ReducerTimeouts
from trinity_events.reducer.idle_groups import IdleGroups
from trinity_events.reducer.leader import LeaderPublisher
from trinity_events.reducer.live_state import LiveState
from trinity_events.reducer.timekeeper import Timekeeper
from trinity_events.replay import current_state
from trinity_events.server import connect
from trinity_events.subscriptions import CLAIM_AFTER, SubscriptionTimeouts, subscription_on
from trinity_schemas import (
    ConsumerDetached,
    DeadlineReached,
    LeaseExpired,
    SaveStarted,
    StepFailed,
    StepReady,
    decode_envelope,
    heartbeat_key,
)

LEASE = 0.3


def leased(step, save_id="a", lease=LEASE):
    return SaveStarted(save_id=save_id, slot=slot(step), lease=lease)


async def beat(log, producer, seconds):
    key = heartbeat_key(log.run_id, producer.incarnation)
    await log._redis.set(key, b"", px=int(seconds * 1000))


async def test_the_saves_of_a_process_that_dies_fail_by_its_lease(
    publisher, log, redis_url, run_id
):
    worker = AsyncPublisher(log, publisher.epoch, new_producer("actor"))
    async with reducer_task(redis_url, run_id):
        await publisher.publish(committed(1, "state_dict", registration()))
        await worker.publish(leased(1))
        [failed] = await announced(log, 1)
        assert isinstance(failed, StepFailed)
        assert "nothing was heard of actor-0" in failed.reason
        assert f"for {LEASE:g} s" in failed.reason
        [expired] = await events_of(log, LeaseExpired)
        assert (expired.producer.role, expired.sequence, expired.epoch) == ("reducer", 1, 1)
        # It finishes all the same, and no other attempt has: that counts.
        await worker.publish(finished(1))
        assert isinstance((await announced(log, 2))[1], StepReady)


async def test_a_process_that_is_heard_of_keeps_its_saves(publisher, log, redis_url, run_id):
    alive, silent = new_producer("actor", 0), new_producer("actor", 1)
    await beat(log, alive, 60)
    async with reducer_task(redis_url, run_id):
        await AsyncPublisher(log, publisher.epoch, alive).publish(leased(1, "alive"))
        await AsyncPublisher(log, publisher.epoch, silent).publish(leased(2, "silent"))
        assert [event.step for event in await announced(log, 1)] == [2]
        [expired] = await events_of(log, LeaseExpired)
        assert expired.event.holder == silent
        # It is expired by the same leader as soon as it is silent too.
        await log._redis.delete(heartbeat_key(run_id, alive.incarnation))
        assert [event.step for event in await announced(log, 2)] == [2, 1]
    assert [entry.sequence for entry in await events_of(log, LeaseExpired)] == [1, 2]


async def test_a_lease_counts_from_the_last_beat_and_not_from_when_that_lapses(
    publisher, log, redis_url, run_id
):
    policy = Policy(timeouts=ReducerTimeouts(lease_check=0.1))
    producer = new_producer("actor")
    await beat(log, producer, 2.0)  # so its last one was an hour ago, but for two seconds
    async with reducer_task(redis_url, run_id, policy=policy):
        await AsyncPublisher(log, publisher.epoch, producer).publish(leased(1, lease=3600.0))
        assert [event.step for event in await announced(log, 1)] == [1]


async def test_a_process_that_dies_with_more_than_an_event_can_tell_is_expired(
    publisher, log, redis_url, run_id
):
    worker = AsyncPublisher(log, publisher.epoch, new_producer("actor"))
    many = 4 * EXPIRED_AT_ONCE + 1
    for number in range(many):
        # With names so long that one event of them all would be above the limit.
        at = slot(number % 100, rank=number, name="\N{GRINNING FACE}" * 256)
        save_id = f"{number:0127}"
        await worker.publish(SaveStarted(save_id=save_id, slot=at, lease=LEASE))
    async with reducer_task(redis_url, run_id):
        await until(partial(_all_expired, log, many))
    events = [entry.event for entry in await events_of(log, LeaseExpired)]
    # The leader may see the first of them expired before it has folded them all.
    assert len({attempt.save_id for event in events for attempt in event.attempts}) == many
    assert sum(len(event.attempts) for event in events) == many
    assert max(len(event.attempts) for event in events) <= EXPIRED_AT_ONCE
    assert (await current_state(log)).attempts == {}


async def _all_expired(log, count):
    return sum(len(entry.event.attempts) for entry in await events_of(log, LeaseExpired)) >= count


class Watched(MemoryEventLog):
    """A log with a leader and one step that is under way, folded by hand."""

    def __init__(self, **options):
        super().__init__("history", **options)
        history = History()
        history.add(committed(1, "state_dict", registration()))
        history.add(SaveStarted(save_id="a", slot=slot(1), lease=LEASE), by="actor")
        self.live = LiveState(history.fold()[0].state)

    def envelopes(self):
        return [decode_envelope(entry.payload) for entry in self.read_now()]

    async def clock(self, step_deadline=600.0):
        token, _ = await self.lead(60)
        return Timekeeper(self, LeaderPublisher(self, token), Policy(step_deadline=step_deadline))


async def test_nobody_is_expired_for_what_was_before_we_led():
    log = Watched()
    began = anyio.current_time()
    clock = await log.clock()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.leases, log.live)
        await until(log.envelopes)
        assert anyio.current_time() - began >= LEASE
        tasks.cancel_scope.cancel()


async def test_what_was_said_is_not_said_again_before_it_is_folded():
    log = Watched()
    clock = await log.clock(step_deadline=0.001)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.leases, log.live)
        tasks.start_soon(clock.deadlines, log.live)
        await until(lambda: len(log.envelopes()) == 2)
        await anyio.sleep(2 * LEASE)
        kinds = {type(envelope.event) for envelope in log.envelopes()}
        assert (len(log.envelopes()), kinds) == (2, {LeaseExpired, DeadlineReached})
        assert sorted(envelope.sequence for envelope in log.envelopes()) == [1, 2]
        # Folded, but the state is as it was: it is said once more, since it is still so.
        log.live.state.position = await log.last_id()
        log.live.notify()
        await until(lambda: len(log.envelopes()) > 2)
        tasks.cancel_scope.cancel()


async def test_a_leader_that_was_overtaken_tells_no_time():
    log = Watched()
    clock = await log.clock(step_deadline=0.001)
    await log.renew(1, 0)
    await log.lead(60)
    with anyio.fail_after(PATIENCE):
        await clock.leases(log.live)
        await clock.deadlines(log.live)
    assert log.envelopes() == []


async def test_deadlines_go_by_the_clock_of_the_server():
    # Of the history, the step was committed a second after the epoch of all clocks.
    early, late = Watched(clock=lambda: 2.0), Watched(clock=lambda: 602.0)
    async with anyio.create_task_group() as tasks:
        for log in (early, late):
            tasks.start_soon((await log.clock(step_deadline=600.0)).deadlines, log.live)
        await until(late.envelopes)
        tasks.cancel_scope.cancel()
    [envelope] = late.envelopes()
    assert envelope.event == DeadlineReached(step=1, kind="state_dict", seconds=600.0)
    assert early.envelopes() == []


async def test_a_clock_that_was_set_back_makes_no_deadline_late(publisher, log, redis_url, run_id):
    # As after an hour was taken from the server's clock: its entry ids go on from where they were.
    ahead = await log.now() + 3_600_000
    await log._redis.execute_command("XSETID", log.keys.events, f"{ahead}-0")
    async with reducer_task(redis_url, run_id, policy=Policy(step_deadline=0.5)):
        for step in (1, 2):
            began = anyio.current_time()
            await publisher.publish(committed(step, "state_dict", registration()))
            await until(partial(_is_failed, log, step), deadline=6)
            assert anyio.current_time() - began >= 0.5, "nor early"


async def _is_failed(log, step):
    return step in [entry.event.step for entry in await events_of(log, DeadlineReached)]


async def test_a_clock_that_is_set_while_a_step_waits_changes_no_deadline():
    hours = [1]
    log = Watched(clock=lambda: 2.0 + 3600 * hours[0])
    clock = await log.clock(step_deadline=3600.0 + 1.5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.deadlines, log.live)
        await anyio.sleep(0.1)
        hours[0] = 0
        await until(log.envelopes, deadline=3)
        tasks.cancel_scope.cancel()


async def test_a_step_that_stays_incomplete_fails_with_what_it_lacks(
    publisher, log, redis_url, run_id
):
    async with reducer_task(redis_url, run_id, policy=Policy(step_deadline=0.2)):
        await publish_steps(publisher, [1])
        await publisher.publish(committed(2, "state_dict", registration(expected=3)))
        failed = (await announced(log, 2))[1]
        assert isinstance(failed, StepFailed)
        assert failed.step == 2
        assert "was not complete 0.2 s after its commit" in failed.reason
        assert "3 of 3 saves" in failed.reason
        # Not again while it stays so; and what was complete in time is none of its business.
        await publisher.publish(committed(3, "state_dict", registration(expected=1)))
        assert [event.step for event in await announced(log, 3)] == [1, 2, 3]
    assert [entry.event.step for entry in await events_of(log, DeadlineReached)] == [2, 3]


async def test_a_group_that_asks_for_nothing_is_detached_by_an_event(
    publisher, log, redis_url, run_id
):
    for group in ("gone", "here"):
        await log.create_group(Stream.ANNOUNCEMENTS, group, "0-0")
    async with reducer_task(redis_url, run_id, policy=Policy(group_idle=3.0)):
        await publish_steps(publisher, [1])
        await announced(log, 1)

        async def read_on():
            while True:
                await log.read_group(Stream.ANNOUNCEMENTS, "here", "one", seconds=0.05)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_on)
            detached = await until(lambda: events_of(log, ConsumerDetached))
            await until(lambda: _names(log, {"here"}))
            tasks.cancel_scope.cancel()
        [event] = [entry.event for entry in detached]
        assert (event.group, event.stream, event.position) == ("gone", "announcements", "0-0")
        assert event.idle >= 3.0
        await until(lambda: _is_known(log))


async def _names(log, expected):
    return {group.name for group in await log.groups(Stream.ANNOUNCEMENTS)} == expected


async def _is_known(log):
    return "announcements/gone" in (await current_state(log)).detached


@pytest.mark.parametrize(
    ("name", "group"),
    [
        (b"caf\xe9", "caf\\xe9"),
        (b"x" * 300, "x" * 256),
        (b"\xff" * 100, ("\\xff" * 100)[:256]),
        (b"", "(without a name)"),
    ],
    ids=["no text", "too long", "too long as text", "empty"],
)
async def test_a_group_of_any_name_is_detached_once(publisher, log, redis_url, run_id, name, group):
    await log._redis.execute_command("XGROUP", "CREATE", log.keys.events, name, "0")
    async with reducer_task(redis_url, run_id, policy=Policy(group_idle=0.5)):
        await until(lambda: _is_without_groups(log))
        await anyio.sleep(1.0)
    assert [entry.event.group for entry in await events_of(log, ConsumerDetached)] == [group]
    assert await log.dead_letters() == []


async def _is_without_groups(log):
    return await log.groups(Stream.EVENTS) == []


async def test_members_of_a_group_of_any_name_are_forgotten(publisher, log):
    key, name = log.keys.events, b"caf\xe9"
    await log._redis.execute_command("XGROUP", "CREATE", key, name, "0")
    for member in ("one", "two"):
        await log._redis.execute_command("XGROUP", "CREATECONSUMER", key, name, member)
    [group] = await log.groups(Stream.EVENTS)
    assert await log.forget_members(Stream.EVENTS, group.name, 0) == 1


@pytest.mark.server
async def test_a_group_is_not_detached_for_the_time_that_the_server_was_down(tmp_path):
    idle = Policy(group_idle=2.0)
    with servers(tmp_path, 1) as [server]:
        async with connect(server.url) as client:
            log = RedisEventLog(client, "run")
            epoch = await open_run(client, "run")
            entry = await AsyncPublisher(log, epoch, new_producer("trainer")).publish(
                committed(1, "state_dict", registration(expected=0))
            )
            await log.create_group(Stream.EVENTS, "eval", "0-0")
            assert await log.read_group(Stream.EVENTS, "eval", "one", seconds=1)
            # So that it keeps when the group was last seen, as a shutdown with a snapshot does.
            await client.bgrewriteaof()
            await until(partial(_is_rewritten, client))
            server.kill()
            await anyio.sleep(2.5)
            began = anyio.current_time()
            await anyio.to_thread.run_sync(server.start)
            assert (await log.groups(Stream.EVENTS))[0].idle > 2.0
            async with reducer_task(server.url, "run", policy=idle):
                await until(partial(_is_folded_to, log, entry))
                [detached] = await until(partial(events_of, log, ConsumerDetached))
                assert detached.event.pending == 2
                assert detached.event.oldest_pending is not None
                assert 2.0 <= detached.event.idle <= anyio.current_time() - began


async def _is_rewritten(client):
    return not (await client.info("persistence"))["aof_rewrite_in_progress"]


async def _is_folded_to(log, entry_id):
    return (await log.load())[1] == entry_id


async def opening_announced(log) -> str:
    """Wait for the announcement of the run's opening; return its id."""
    [opening] = await until(partial(log.read, stream=Stream.ANNOUNCEMENTS))
    return opening.id


@pytest.mark.parametrize("by", ["subscribe", "a client of its own"])
async def test_a_group_that_waits_is_not_detached(publisher, log, redis_url, run_id, by):
    """A member that blocks leaves no trace on Redis 7.0, and a group of others only that."""
    policy, heard = Policy(group_idle=1.0), anyio.Event()

    async def listen():
        if by == "subscribe":
            async with subscribe(run_id, StepReady, redis_url=redis_url, group="eval") as events:
                assert (await anext(aiter(events))).step == 1
        else:
            async with connect(redis_url) as client:
                key = {log.keys.announcements: ">"}
                while not await client.xreadgroup("eval", "one", key, block=5000):
                    pass
        heard.set()

    async with reducer_task(redis_url, run_id, policy=policy), anyio.create_task_group() as tasks:
        await log.create_group(Stream.ANNOUNCEMENTS, "eval", await opening_announced(log))
        tasks.start_soon(listen)
        looked = anyio.current_time()
        await until(lambda: _is_later(looked + 4 * policy.group_idle))
        assert await events_of(log, ConsumerDetached) == []
        await publish_steps(publisher, [1])
        with anyio.fail_after(PATIENCE):
            await heard.wait()
    assert [group.name for group in await log.groups(Stream.ANNOUNCEMENTS)] == ["eval"]


async def test_a_group_is_not_detached_while_a_member_waits_beside_one_that_is_slow(
    publisher, log, redis_url, run_id
):
    policy = Policy(group_idle=3.0)
    member = subscription_on(
        lambda: nullcontext(log),
        run_id,
        StepReady,
        start="current",
        group="eval",
        deadline=None,
        claim_after=CLAIM_AFTER,
        timeouts=SubscriptionTimeouts(read=0.2),
    )

    async def wait_for_more():
        async with member as events:
            await anext(aiter(events))

    async with reducer_task(redis_url, run_id, policy=policy), anyio.create_task_group() as tasks:
        await publish_steps(publisher, [1])
        await announced(log, 1)
        *_, earlier, _ = await log.read(stream=Stream.ANNOUNCEMENTS)
        await log.create_group(Stream.ANNOUNCEMENTS, "eval", earlier.id)
        assert await log.read_group(Stream.ANNOUNCEMENTS, "eval", "slow", seconds=30)
        tasks.start_soon(wait_for_more)
        await anyio.sleep(3 * policy.group_idle)
        [group] = await log.groups(Stream.ANNOUNCEMENTS)
        assert (group.pending, group.members) == (1, 2)
        assert await events_of(log, ConsumerDetached) == []
        tasks.cancel_scope.cancel()


async def _is_later(moment):
    return anyio.current_time() >= moment


async def test_a_group_that_has_dealt_with_everything_holds_up_nothing_and_stays(
    publisher, log, redis_url, run_id
):
    async with reducer_task(redis_url, run_id, policy=Policy(group_idle=0.5)):
        await log.create_group(Stream.ANNOUNCEMENTS, "weekly", await opening_announced(log))
        await anyio.sleep(1.5)
        assert await events_of(log, ConsumerDetached) == []
        await publish_steps(publisher, [1])
        [detached] = await until(lambda: events_of(log, ConsumerDetached))
        assert detached.event.group == "weekly"


async def test_a_leader_that_was_overtaken_detaches_nobody():
    log = MemoryEventLog("history")
    entry = await log.append(b"")
    await log.create_group(Stream.EVENTS, "gone", "0-0")
    token, _ = await log.lead(60)
    await log.renew(token, 0)
    await log.lead(60)
    consumers = IdleGroups(log, LeaderPublisher(log, token), token, idle=1e-6)
    with anyio.fail_after(PATIENCE):
        await consumers.run(LiveState(MonitorState(run_id="history")))
    assert [group.name for group in await log.groups(Stream.EVENTS)] == ["gone"]
    assert [record.id for record in log.read_now()] == [entry]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_policy_of_nonsense_is_one_sentence(seconds):
    with raises(InvalidPolicy, option="--step-deadline", fault="seconds"):
        Policy(step_deadline=seconds)
    with raises(InvalidPolicy, option="--group-idle", fault="seconds"):
        Policy(group_idle=seconds)
    with raises(InvalidPolicy, option="--keep-checkpoints", value=-1, fault="negative"):
        Policy(keep_checkpoints=-1)
    with raises(InvalidPolicy, value=1025, fault="unknown", limit=1024):
        Policy(keep_checkpoints=1025)


def test_commands_refuse_a_policy_of_nonsense(cli, tmp_path):
    for command in ("reducer", "serve"):
        refused = cli(command, "--step-deadline", "-5", env={"TRINITY_HOME": str(tmp_path)})
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: --step-deadline is -5, but takes")
        assert not list(tmp_path.iterdir()), "before anything was started"
