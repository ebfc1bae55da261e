"""What holds of every event log: on a real server, and of the twin in memory."""

import random
import re
import threading
from functools import partial
from itertools import pairwise

import anyio
import pytest
import redis

from tests.support.errors import raises
from tests.support.event_histories import committed
from tests.support.waits import PATIENCE
from trinity_events.log import (
    DEAD_LETTER_BYTES,
    DEAD_LETTERS_KEPT,
    ORIGIN,
    AsyncPublisher,
    Commit,
    DeadLetter,
    Entry,
    GroupInfo,
    Publisher,
    RedisEventLog,
    Stream,
    SyncEventLog,
    new_producer,
    position,
)
from trinity_events.log.memory.event_log import MemoryEventLog, SyncMemoryEventLog
from trinity_events.server import connect, open_client
from trinity_schemas import MessageUndecodable, decode_envelope

pytestmark = pytest.mark.server

EVENTS, ANNOUNCEMENTS = Stream.EVENTS, Stream.ANNOUNCEMENTS


@pytest.fixture(params=["memory", "redis"])
async def log(request, run_id):
    if request.param == "memory":
        yield MemoryEventLog(run_id)
    else:
        async with connect(request.getfixturevalue("redis_url")) as client:
            yield RedisEventLog(client, run_id)


@pytest.fixture
def sync_log(log, request):
    if isinstance(log, MemoryEventLog):
        opened = SyncMemoryEventLog(log)
    else:
        opened = SyncEventLog(open_client(request.getfixturevalue("redis_url")), log.run_id)
    yield opened
    opened.close()


def payloads(entries):
    return [entry.payload for entry in entries]


# Reading and waiting


async def test_entries_are_read_in_order_and_after_a_position(log):
    assert not await log.exists()
    assert await log.last_id() == ORIGIN
    ids = [await log.append(bytes([number])) for number in range(5)]
    assert payloads(await log.read()) == [bytes([n]) for n in range(5)]
    assert [entry.id for entry in await log.read(ids[1], limit=2)] == ids[2:4]
    assert [entry.id for entry in await log.read(ids[1], through=ids[3])] == ids[2:4]
    assert await log.read(ids[3], through=ids[2]) == []
    assert await log.last_id() == ids[-1]
    assert await log.exists()
    assert await log.read(stream=ANNOUNCEMENTS) == []


async def test_ids_only_rise_however_fast_they_are_taken(log):
    ids = [position(await log.append(b"")) for _ in range(500)]
    assert all(earlier < later for earlier, later in pairwise(ids))


async def test_a_wait_returns_what_is_appended_meanwhile(log):
    received = []

    async def wait():
        received.extend(await log.read_blocking({EVENTS: ORIGIN}, seconds=5))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.sleep(0.05)
        assert received == []
        entry_id = await log.append(b"now")
    assert received == [(EVENTS, Entry(entry_id, b"now"))]


async def test_everyone_who_waits_is_woken_on_either_stream(log):
    token, _ = await log.lead(5)
    received = []

    async def wait():
        received.append(await log.read_blocking({EVENTS: ORIGIN, ANNOUNCEMENTS: ORIGIN}, seconds=9))

    with anyio.fail_after(8):  # before it would come back by itself
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(wait)
            await anyio.sleep(0.05)
            await log.commit(
                Commit(token=token, after=ORIGIN, position="1-0", announcements=[("", b"a")])
            )
    assert [[(stream, entry.payload) for stream, entry in each] for each in received] == [
        [(ANNOUNCEMENTS, b"a")]
    ] * 3


async def test_what_a_thread_appends_wakes_who_waits(log, sync_log):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, sync_log.append, b"from a thread")
        with anyio.fail_after(8):  # before it would come back by itself
            [(_, entry)] = await log.read_blocking({EVENTS: ORIGIN}, seconds=9)
    assert entry.payload == b"from a thread"
    assert sync_log.read() == [entry]
    assert sync_log.read(entry.id) == sync_log.read(stream=ANNOUNCEMENTS) == []


async def test_a_wait_takes_at_most_so_many_of_each_stream(log):
    for number in range(5):
        await log.append(bytes([number]))
    received = await log.read_blocking({EVENTS: ORIGIN, ANNOUNCEMENTS: ORIGIN}, seconds=1, limit=3)
    assert payloads(entry for _, entry in received) == [b"\0", b"\1", b"\2"]


async def test_a_wait_for_nothing_returns_empty(log):
    assert await log.read_blocking({EVENTS: ORIGIN}, seconds=0.05) == []


async def test_a_wait_can_be_cancelled(log):
    with anyio.move_on_after(0.05) as scope:
        await log.read_blocking({EVENTS: ORIGIN}, seconds=5)
    assert scope.cancelled_caught


# Epochs and publishers


async def test_each_opening_takes_the_next_epoch_and_says_so_in_its_event(log):
    epochs = []

    async def take():
        epochs.append(await log.open_epoch(lambda epoch: b"%d" % epoch))

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(take)
    assert sorted(epochs) == list(range(1, 11))
    assert [int(payload) for payload in payloads(await log.read())] == list(range(1, 11))


async def test_an_opening_that_fails_takes_no_epoch(log):
    def fail(epoch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await log.open_epoch(fail)
    assert await log.open_epoch(lambda epoch: b"first") == 1
    assert payloads(await log.read()) == [b"first"]


async def test_the_leader_alone_raises_the_counter_of_epochs_and_it_never_goes_back(log):
    token, _ = await log.lead(60)
    assert await log.open_epoch(lambda epoch: b"") == 1
    assert await log.raise_epoch(token - 1, 9) is None
    assert [await log.raise_epoch(token, epoch) for epoch in (1, 7, 5)] == [1, 1, 7]
    assert await log.open_epoch(lambda epoch: b"") == 8


async def test_publishers_number_their_events_in_the_order_of_the_log(log, sync_log):
    publisher = Publisher(sync_log, 1, new_producer("actor"))

    def publish():
        for _ in range(50):
            publisher.publish(committed(1))

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join)
    await anyio.to_thread.run_sync(publisher.close, 20)
    sequences = [decode_envelope(entry.payload).sequence for entry in await log.read()]
    assert sequences == list(range(1, 201))


async def test_what_is_published_to_the_twin_is_in_it_at_once(run_id):
    log = MemoryEventLog(run_id)
    publisher = Publisher(SyncMemoryEventLog(log), 1, new_producer("actor"))
    publisher.publish(committed(1))
    assert len(log.read_now()) == 1
    assert publisher.backlog == 0
    publisher.close(0)


async def test_an_event_that_breaks_the_contract_is_refused_by_its_sender(log):
    publisher = AsyncPublisher(log, 1, new_producer("no slug"))
    with raises(MessageUndecodable, reason=re.compile(r"producer\.role")):
        await publisher.publish(committed(1))
    assert await log.read() == []


# The lead and the reducer's step


async def test_a_commit_counts_only_for_the_newest_leader_and_from_its_own_position(log):
    announce = [("step-ready/weights", b"announced")]
    unled = Commit(token=0, after=ORIGIN, position="1-0", announcements=announce)
    assert not await log.commit(unled), "no one leads"
    token, _ = await log.lead(0.05)
    await anyio.sleep(0.1)
    newer, _ = await log.lead(5)
    assert newer == token + 1
    assert await log.lead(5) == (0, pytest.approx(5, abs=4))
    stale = Commit(token=token, after=ORIGIN, position="1-0", announcements=announce)
    assert not await log.commit(stale)
    ahead = Commit(token=newer, after="1-0", position="2-0", announcements=announce)
    assert not await log.commit(ahead)
    assert await log.load() == (None, ORIGIN)
    fresh = Commit(token=newer, after=ORIGIN, position="1-0", announcements=announce, snapshot=b"s")
    assert await log.commit(fresh)
    assert not await log.commit(fresh), "the same step, sent again"
    [announced] = await log.read(stream=ANNOUNCEMENTS)
    assert announced.payload == b"announced"
    assert await log.load() == (b"s", "1-0")
    [standing] = await log.current_announcements()
    assert standing == ("step-ready/weights", announced)


async def test_what_stands_is_the_newest_of_its_subject_until_it_is_retracted(log):
    token, _ = await log.lead(5)
    first = [("a", b"a1"), ("", b"unnamed"), ("b", b"b1"), ("a", b"a2")]
    await log.commit(Commit(token=token, after=ORIGIN, position="1-0", announcements=first))
    assert [
        (announcement.subject, announcement.entry.payload)
        for announcement in await log.current_announcements()
    ] == [
        ("b", b"b1"),
        ("a", b"a2"),
    ], "in the order of the stream"
    # What a step announces stands, although the same step retracts what stood.
    step = Commit(
        token=token, after="1-0", position="2-0", announcements=[("a", b"a3")], retracted=["a", "b"]
    )
    await log.commit(step)
    assert [
        (announcement.subject, announcement.entry.payload)
        for announcement in await log.current_announcements()
    ] == [("a", b"a3")]
    assert payloads(await log.read(stream=ANNOUNCEMENTS)) == [
        b"a1",
        b"unnamed",
        b"b1",
        b"a2",
        b"a3",
    ]


async def test_a_snapshot_stays_until_the_next_one(log):
    token, _ = await log.lead(5)
    await log.commit(Commit(token=token, after=ORIGIN, position="1-0", snapshot=b"one"))
    await log.commit(Commit(token=token, after="1-0", position="2-0"))
    assert await log.load() == (b"one", "2-0")


async def test_what_the_leader_appends_counts_only_while_it_leads(log):
    assert await log.append_leading(0, b"no one leads") is None
    former, _ = await log.lead(5)
    entry_id = await log.append_leading(former, b"led")
    assert await log.read() == [Entry(entry_id, b"led")]
    await log.renew(former, 0)
    assert await log.append_leading(former, b"until another does") is not None
    token, _ = await log.lead(5)
    assert await log.append_leading(former, b"late") is None
    assert await log.append_leading(token, b"now") == await log.last_id()


async def test_a_heartbeat_lasts_as_long_as_its_lease_and_not_after_a_rest(log, sync_log):
    assert await log.heartbeat_ttls([]) == await log.heartbeat_ttls(["a"]) == {}
    sync_log.renew_heartbeat("a", 60)
    sync_log.renew_heartbeat("b", 0.2)
    sync_log.renew_heartbeat("c", 60)
    sync_log.clear_heartbeat("c")
    sync_log.clear_heartbeat("never")
    [(name, seconds)] = (await log.heartbeat_ttls(["a", "c", "d"])).items()
    assert name == "a" and 40 < seconds <= 60
    with anyio.fail_after(PATIENCE):
        while set(await log.heartbeat_ttls(["a", "b"])) != {"a"}:
            await anyio.sleep(0.02)
    sync_log.renew_heartbeat("b", 60)
    sync_log.renew_heartbeat("a", 0.001)
    with anyio.fail_after(PATIENCE):
        while set(await log.heartbeat_ttls(["a", "b"])) != {"b"}:
            await anyio.sleep(0.02)


async def test_its_clock_is_that_of_the_entries(log):
    before = await log.now()
    entry_id = await log.append(b"")
    assert before <= position(entry_id)[0] <= await log.now()


async def test_threads_learn_of_a_newer_epoch(log, sync_log):
    assert sync_log.epoch() == 0
    await log.open_epoch(lambda epoch: b"")
    await log.open_epoch(lambda epoch: b"")
    assert sync_log.epoch() == 2


async def test_a_grant_is_heard_by_those_who_wait_and_again_by_those_who_ask_later(log, sync_log):
    token, _ = await log.lead(5)
    heard = []

    def wait(save_id):
        heard.append((save_id, sync_log.granted(save_id, 20)))

    async with anyio.create_task_group() as tasks:
        for save_id in ("s1", "s1", "s2"):
            tasks.start_soon(anyio.to_thread.run_sync, wait, save_id)
        await anyio.sleep(0.05)
        assert heard == []
        stale = Commit(token=token, after="5-0", position="6-0", grants=["s1"])
        assert not await log.commit(stale)
        assert not await anyio.to_thread.run_sync(sync_log.granted, "s1", 0.05)
        grants = Commit(token=token, after=ORIGIN, position="1-0", grants=["s1", "s2"])
        assert await log.commit(grants)
    assert sorted(heard) == [("s1", True), ("s1", True), ("s2", True)]
    assert sync_log.granted("s1", 0)
    assert not sync_log.granted("s3", 0)


async def test_many_are_appended_in_their_order(log, sync_log):
    assert sync_log.append_many([]) == []
    ids = sync_log.append_many([b"%d" % number for number in range(600)])
    entries = await log.read()
    assert [entry.id for entry in entries] == ids
    assert payloads(entries) == [b"%d" % number for number in range(600)]


async def test_a_checkpoint_that_is_held_is_not_doomed_and_one_that_is_doomed_not_held(log):
    token, _ = await log.lead(5)
    assert await log.acquire_lease(1, "a reader", 60)
    assert await log.acquire_lease(1, "another", 60)
    assert await log.acquire_lease(2, "a reader", 0.05)
    await log.release_lease(3, "nobody")
    assert (
        await log.mark_deleting(token + 1, [5]) == await log.mark_deleting(token - 1, [5]) == set()
    )
    assert await log.mark_deleting(token, [1, 11, 3]) == {11, 3}
    assert not await log.acquire_lease(3, "a reader", 60)
    await log.release_lease(1, "another")
    assert await log.mark_deleting(token, [1]) == set(), "one still holds it"
    await log.release_lease(1, "a reader")
    assert await log.mark_deleting(token, [1]) == {1}
    with anyio.fail_after(PATIENCE):
        while not await log.mark_deleting(token, [2]):  # until the hold lapses
            await anyio.sleep(0.02)
    assert not await log.clear_deleting(token - 1, [3])
    assert not await log.acquire_lease(3, "a reader", 60)
    assert await log.clear_deleting(token, [1, 3])
    assert await log.acquire_lease(3, "a reader", 60)
    assert not await log.acquire_lease(2, "a reader", 60)
    assert not await log.clear_deleting(token - 1)
    assert not await log.acquire_lease(2, "a reader", 60)
    assert await log.clear_deleting(token)
    assert await log.acquire_lease(2, "a reader", 60)


async def test_a_reader_that_waits_for_folders_hears_of_each_promotion_since_it_looked(log):
    assert await log.promoted_after(ORIGIN, seconds=0.01) == ORIGIN
    heard = []

    async def wait():
        heard.append(await log.promoted_after(ORIGIN, seconds=PATIENCE))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await log.notify_promoted()
    [first] = heard
    assert await log.promoted_after(first, seconds=0.01) == first
    await log.notify_promoted()
    await log.notify_promoted()
    assert position(await log.promoted_after(first, seconds=PATIENCE)) > position(first)


async def test_dead_letters_are_bounded_and_the_newest_stay(log):
    token, _ = await log.lead(5)
    after = ORIGIN
    for number in range(1, 4):
        letters = [
            DeadLetter(Entry(f"{number}-{n}", b"x"), "foreign") for n in range(DEAD_LETTERS_KEPT)
        ]
        reached = f"{number}-{DEAD_LETTERS_KEPT}"
        step = Commit(token=token, after=after, position=reached, dead_letters=letters)
        assert await log.commit(step)
        after = reached
    retained = await log.dead_letters()
    assert retained[-DEAD_LETTERS_KEPT:] == letters
    assert len(retained) < 2 * DEAD_LETTERS_KEPT


async def test_dead_letters_are_kept_with_their_reason(log):
    token, _ = await log.lead(5)
    letter = DeadLetter(Entry("9-0", b"\xff"), "not MessagePack")
    assert await log.commit(
        Commit(token=token, after=ORIGIN, position="9-0", dead_letters=[letter])
    )
    assert await log.dead_letters() == [letter]


async def test_of_a_long_dead_letter_the_beginning_is_kept(log):
    long = bytes(range(256)) * (DEAD_LETTER_BYTES // 128)
    await log.create_group(EVENTS, "g", ORIGIN)
    at = await log.append(long)
    await log.read_group(EVENTS, "g", "one", seconds=1)
    await log.claim(EVENTS, "g", "two", idle=0, most=1)
    token, _ = await log.lead(5)
    letter = DeadLetter(Entry(at, long), "not MessagePack: " + "x" * 100_000)
    assert await log.commit(Commit(token=token, after=ORIGIN, position=at, dead_letters=[letter]))
    of_group, of_reducer = await log.dead_letters()
    assert of_group.entry == of_reducer.entry == Entry(at, long[:DEAD_LETTER_BYTES])
    assert of_reducer.reason.startswith("not MessagePack: x")
    assert len(of_reducer.reason) <= 1000
    assert await log.read() == [Entry(at, long)], "the log has it whole"


async def test_a_lease_that_is_not_renewed_is_free(log):
    token, _ = await log.lead(5)
    assert not await log.renew(token + 1, 5)
    assert await log.renew(token, 0.05)
    await anyio.sleep(0.1)
    assert not await log.renew(token, 5)
    assert await log.lead(5) == (token + 1, 5)


async def test_a_lead_that_is_given_up_is_free_at_once(log):
    token, _ = await log.lead(5)
    assert await log.renew(token, 0)
    assert not await log.renew(token, 5)
    assert (await log.lead(5))[0] == token + 1


# Groups


async def test_each_entry_goes_to_one_member_of_a_group(log):
    await log.create_group(EVENTS, "g", ORIGIN)
    for number in range(5):
        await log.append(bytes([number]))
    first = await log.read_group(EVENTS, "g", "one", seconds=1, limit=2)
    second = await log.read_group(EVENTS, "g", "two", seconds=1)
    assert payloads(first + second) == [bytes([n]) for n in range(5)]
    assert len(first) == 2
    assert await log.read_group(EVENTS, "g", "one", seconds=0.02) == []


async def test_of_members_that_wait_one_gets_what_comes(log):
    await log.create_group(EVENTS, "g", ORIGIN)
    received = []

    async def member(name):
        received.extend(await log.read_group(EVENTS, "g", name, seconds=0.5))

    async with anyio.create_task_group() as tasks:
        for name in ("one", "two", "three"):
            tasks.start_soon(member, name)
        await anyio.sleep(0.05)
        await log.append(b"once")
    assert payloads(received) == [b"once"]


async def test_a_group_begins_where_it_was_first_created_and_groups_know_nothing_of_others(log):
    ids = [await log.append(bytes([number])) for number in range(3)]
    await log.create_group(EVENTS, "g", ids[1])
    await log.create_group(EVENTS, "g", ORIGIN)  # it is there, and stays as it is
    await log.create_group(EVENTS, "h", ORIGIN)
    for group, count in (("g", 1), ("h", 3)):
        assert len(await log.read_group(EVENTS, group, "m", seconds=1)) == count


async def test_what_is_left_pending_is_claimed_once_it_is_idle_and_not_after_its_ack(log):
    await log.create_group(EVENTS, "g", ORIGIN)
    for number in range(3):
        await log.append(bytes([number]))
    first, *rest = await log.read_group(EVENTS, "g", "crashed", seconds=1)
    await log.ack(EVENTS, "g", first.id)
    claim = partial(log.claim, EVENTS, "g", most=5)
    assert await claim("other", idle=60) == ([], [])
    await anyio.sleep(0.65)
    assert await claim("other", idle=0.6, limit=1) == (rest[:1], [])
    assert await claim("third", idle=0.6) == (rest[1:], []), "the other is fresh"
    for entry in rest:
        await log.ack(EVENTS, "g", entry.id)
        await log.ack(EVENTS, "g", entry.id)
    assert await claim("other", idle=0) == ([], [])


async def test_what_was_given_too_often_becomes_a_dead_letter_and_the_rest_goes_on(log):
    group = "TIMES {0}"  # words of its own, where a reason is made of them
    await log.create_group(EVENTS, group, ORIGIN)
    await log.append(b"poison")
    await log.append(b"sound")
    poison, sound = await log.read_group(EVENTS, group, "one", seconds=1)
    assert await log.claim(EVENTS, group, "two", idle=0, most=3, limit=1) == ([poison], [])
    assert await log.claim(EVENTS, group, "three", idle=0, most=3) == ([poison, sound], [])
    assert await log.claim(EVENTS, group, "four", idle=0, most=3) == ([sound], [poison])
    reason = "group TIMES {0}: delivered 3 times and never acknowledged"
    assert await log.dead_letters() == [DeadLetter(poison, reason)]
    await log.ack(EVENTS, group, sound.id)
    assert await log.claim(EVENTS, group, "five", idle=0, most=3) == ([], [])
    assert (await log.groups(EVENTS))[0].pending == 0
    assert await log.read(limit=1) == [poison], "the log keeps it for all others"


async def test_how_a_group_stands_is_told(log):
    assert await log.groups(EVENTS) == []
    ids = [await log.append(bytes([number])) for number in range(3)]
    await log.create_group(EVENTS, "g", ORIGIN)
    await log.create_group(EVENTS, "h", ids[1])
    first, second = await log.read_group(EVENTS, "g", "one", seconds=1, limit=2)
    await log.ack(EVENTS, "g", first.id)
    await log.read_group(EVENTS, "g", "two", seconds=0.001, limit=1)
    await log.ack(EVENTS, "g", ids[2])
    g, h = await log.groups(EVENTS)
    assert g == GroupInfo("g", 1, ids[2], second.id, g.idle, 2, caught_up=False)
    assert h == GroupInfo("h", 0, ids[1], None, h.idle, 0, caught_up=False)
    assert 0 <= g.idle < 10
    assert 0 <= h.idle < 10, "a group that no one has joined yet was not idle for ever"
    assert await log.groups(ANNOUNCEMENTS) == []
    await log.ack(EVENTS, "g", second.id)
    g, h = await log.groups(EVENTS)
    assert (g.caught_up, h.caught_up) == (True, False)


async def test_a_member_that_waits_leaves_a_trace(log):
    await log.create_group(EVENTS, "g", ORIGIN)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(log.read_group, EVENTS, "g", "one", seconds=30))
        with anyio.fail_after(PATIENCE):
            while not (await log.groups(EVENTS))[0].members:
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


async def test_the_idleness_of_a_group_is_that_of_its_last_member_to_ask(log):
    async def idle():
        return (await log.groups(EVENTS))[0].idle

    await log.create_group(EVENTS, "g", ORIGIN)
    await log.read_group(EVENTS, "g", "one", seconds=0.001)
    with anyio.fail_after(PATIENCE):
        while (before := await idle()) < 0.2:
            await anyio.sleep(0.02)
        await log.read_group(EVENTS, "g", "two", seconds=0.001)
        while await idle() >= before:
            await log.read_group(EVENTS, "g", "two", seconds=0.001)


async def test_members_are_forgotten_that_are_idle_and_have_nothing_pending_but_not_the_last(log):
    assert await log.forget_members(EVENTS, "g", 0) == 0
    await log.append(b"pending")
    await log.create_group(EVENTS, "g", ORIGIN)
    await log.read_group(EVENTS, "g", "busy", seconds=1)
    for member in ("gone", "away", "last"):
        await log.read_group(EVENTS, "g", member, seconds=0.001)
        await anyio.sleep(0.02)
    assert await log.forget_members(EVENTS, "g", 60) == 0
    await log.forget_members(EVENTS, "g", 0)
    [group] = await log.groups(EVENTS)
    assert (group.members, group.pending) == (2, 1), "the busy one, and the last one to ask"
    [claimed] = (await log.claim(EVENTS, "g", "last", idle=0, most=5)).entries
    await log.ack(EVENTS, "g", claimed.id)
    await anyio.sleep(0.02)
    await log.read_group(EVENTS, "g", "last", seconds=0.001)
    assert await log.forget_members(EVENTS, "g", 0) == 1


async def test_a_group_is_destroyed_by_the_newest_leader_alone_and_its_members_hear_of_it(log):
    await log.create_group(EVENTS, "g", ORIGIN)
    assert not await log.destroy_group(EVENTS, "g", token=0), "no one leads"
    former, _ = await log.lead(5)
    await log.renew(former, 0)
    token, _ = await log.lead(5)
    assert not await log.destroy_group(EVENTS, "g", token=former)
    assert len(await log.groups(EVENTS)) == 1
    refused = []

    async def wait():
        with pytest.raises(redis.ResponseError, match="NOGROUP") as caught:
            await log.read_group(EVENTS, "g", "m", seconds=5)
        refused.append(caught)

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            while not (await log.groups(EVENTS))[0].members:
                await anyio.sleep(0.01)
            assert await log.destroy_group(EVENTS, "g", token=token)
    assert refused
    assert await log.groups(EVENTS) == []
    assert await log.destroy_group(EVENTS, "g", token=token), "it is gone, as was asked"
    assert await log.destroy_group(ANNOUNCEMENTS, "g", token=token)


async def test_a_group_that_was_never_created_is_an_error(log):
    with pytest.raises(redis.ResponseError, match="NOGROUP"):
        await log.read_group(EVENTS, "missing", "m", seconds=1)
    with pytest.raises(redis.ResponseError, match="NOGROUP"):
        await log.claim(EVENTS, "missing", "m", idle=1, most=5)
    await log.ack(EVENTS, "missing", "1-0")


# Trimming


async def test_a_former_leader_trims_nothing(log):
    ids = [await log.append(bytes([number])) for number in range(3)]
    former, _ = await log.lead(5)
    await log.renew(former, 0)
    token, _ = await log.lead(5)
    assert await log.trim(EVENTS, ids[2], token=former) == 0
    assert await log.trim(EVENTS, ids[2], token=token) == 2


async def test_nothing_is_trimmed_that_a_group_still_needs(log):
    assert await log.trim(EVENTS, "5-0") == 0
    assert await log.first_retained_id(EVENTS) is None
    ids = [await log.append(bytes([number])) for number in range(5)]
    await log.create_group(EVENTS, "g", ORIGIN)
    assert await log.trim(EVENTS, ids[4]) == 0
    assert await log.first_retained_id(EVENTS) is None
    first, second = await log.read_group(EVENTS, "g", "m", seconds=1, limit=2)
    await log.ack(EVENTS, "g", first.id)
    assert await log.trim(EVENTS, ids[4]) == 1
    assert await log.first_retained_id(EVENTS) == second.id
    await log.ack(EVENTS, "g", second.id)
    await log.read_group(EVENTS, "g", "m", seconds=1)
    for entry_id in ids[2:]:
        await log.ack(EVENTS, "g", entry_id)
    assert await log.trim(EVENTS, ids[3]) == 2
    assert [entry.id for entry in await log.read()] == ids[3:]
    assert position(await log.append(b"next")) > position(ids[-1])


# All of it at once


class Player:
    """Plays random commands, and notes what they answered: ids by their order in their stream."""

    def __init__(self, log, seed):
        self.log = log
        self.draw = random.Random(seed)
        self.ids = {stream: [ORIGIN] for stream in Stream}
        self.token, self.folded, self.answers = 0, ORIGIN, []

    def indexed(self, stream, entries):
        return [(self.ids[stream].index(entry.id), entry.payload) for entry in entries]

    async def play(self, turns):
        commands = [
            *(self.append, self.read, self.wait, self.commit, self.commit, self.lead),
            *(self.create_group, self.read_group, self.claim, self.trim, self.groups),
            *(self.hold, self.doom, self.append_leading, self.destroy_group),
        ]
        for turn in range(turns):
            command, stream = self.draw.choice(commands), self.draw.choice(list(Stream))
            after, group = self.draw.choice(self.ids[stream]), self.draw.choice("gh")
            try:
                answer = await command(turn, stream, after, group)
            except redis.ResponseError:
                answer = "refused"
            self.answers.append((command.__name__, answer))
        return self.answers

    async def append(self, turn, *_):
        self.ids[EVENTS].append(await self.log.append(b"%d" % turn))

    async def read(self, turn, stream, after, group):
        limit, through = self.draw.randint(1, 9), self.draw.choice(["+", *self.ids[stream]])
        entries = await self.log.read(after, stream=stream, limit=limit, through=through)
        return self.indexed(stream, entries)

    async def wait(self, turn, stream, after, group):
        received = await self.log.read_blocking({stream: after}, seconds=0.001, limit=3)
        return self.indexed(stream, [entry for _, entry in received])

    async def commit(self, turn, *_):
        payload, draw = b"%d" % turn, self.draw
        commit = Commit(
            token=self.token + draw.choice([0, 0, 0, -1]),
            after=draw.choice([self.folded, self.folded, self.folded, "9-9"]),
            position=f"{turn}-1",
            announcements=[(draw.choice(["a", "b", ""]), payload)] * draw.randint(0, 3),
            retracted=draw.choice([[], [], ["a"], ["b", "c"]]),
            dead_letters=draw.choice([[], [DeadLetter(Entry("7-7", payload), "foreign")]]),
            snapshot=draw.choice([None, payload]),
        )
        committed = await self.log.commit(commit)
        self.folded = commit.position if committed else self.folded
        added = await self.log.read(self.ids[ANNOUNCEMENTS][-1], stream=ANNOUNCEMENTS)
        self.ids[ANNOUNCEMENTS] += [entry.id for entry in added]
        standing = [
            (s, *self.indexed(ANNOUNCEMENTS, [e]))
            for s, e in await self.log.current_announcements()
        ]
        dead = [(letter.entry.payload, letter.reason) for letter in await self.log.dead_letters()]
        return committed, sorted(standing), await self.log.load(), dead

    async def lead(self, *_):
        renewed = await self.log.renew(self.token, self.draw.choice([0, 60]))
        fresh, _ = await self.log.lead(60)
        self.token = fresh or self.token
        return renewed, fresh

    async def create_group(self, turn, stream, after, group):
        await self.log.create_group(stream, group, after)

    async def read_group(self, turn, stream, after, group):
        entries = await self.log.read_group(stream, group, "m", seconds=0.001, limit=4)
        for entry in entries[::2]:
            await self.log.ack(stream, group, entry.id)
        return self.indexed(stream, entries)

    async def claim(self, turn, stream, after, group):
        entries, dead = await self.log.claim(stream, group, "n", idle=0, most=3, limit=3)
        for entry in entries[:1]:
            await self.log.ack(stream, group, entry.id)
        return self.indexed(stream, entries), self.indexed(stream, dead)

    async def groups(self, turn, stream, after, group):
        def index(at):
            return at and self.ids[stream].index(at)

        return [
            (
                *group[:2],
                *(index(group.last_delivered), index(group.oldest_pending)),
                *(group.members, group.caught_up),
            )
            for group in await self.log.groups(stream)
        ]

    async def destroy_group(self, turn, stream, after, group):
        token = self.token if self.draw.random() < 0.2 else -1
        return await self.log.destroy_group(stream, group, token=token)

    async def hold(self, *_):
        step, who = self.draw.randint(1, 5), self.draw.choice("ab")
        await self.log.release_lease(self.draw.randint(1, 5), who)
        return await self.log.acquire_lease(step, who, 60)

    async def doom(self, *_):
        token, steps = self.token - self.draw.choice([0, 0, 1]), self.draw.sample(range(1, 6), 3)
        doomed = await self.log.mark_deleting(token, steps)
        return doomed, await self.log.clear_deleting(token, self.draw.sample(range(1, 6), 2))

    async def append_leading(self, turn, *_):
        token = self.token - self.draw.choice([0, 0, 1])
        added = await self.log.append_leading(token, b"%d" % turn)
        self.ids[EVENTS] += [added] if added else []
        return added is not None

    async def trim(self, turn, stream, after, group):
        dropped = await self.log.trim(stream, after) if self.draw.random() < 0.3 else 0
        first = await self.log.first_retained_id(stream)
        return dropped, first and self.ids[stream].index(first)


@pytest.mark.parametrize("seed", range(5))
async def test_the_twin_answers_random_commands_as_the_server_does(seed, redis_url, run_id):
    async with connect(redis_url) as client:
        served = await Player(RedisEventLog(client, run_id), seed).play(500)
    assert await Player(MemoryEventLog(run_id), seed).play(500) == served


async def test_the_twins_ids_rise_when_its_clock_goes_back():
    times = iter([5.0, 5.0, 3.0, 6.0])
    log = MemoryEventLog("run", clock=lambda: next(times))
    assert [await log.append(b"") for _ in range(4)] == ["5000-0", "5000-1", "5000-2", "6000-0"]
