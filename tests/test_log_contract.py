"""What holds of every event log: on a real server, and of the twin in memory."""

import random
import threading
from itertools import pairwise

import anyio
import pytest
import redis

from tests.histories import committed
from trinity_events.log import (
    ORIGIN,
    AsyncPublisher,
    Commit,
    DeadLetter,
    Entry,
    Publisher,
    RedisEventLog,
    Stream,
    SyncEventLog,
    new_producer,
    position,
)
from trinity_events.log.memory_log import MemoryEventLog, SyncMemoryEventLog
from trinity_events.server import connect, open_client
from trinity_schemas import ContractError, decode_envelope

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


def payloads(found):
    return [entry.payload for entry in found]


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
    found = []

    async def wait():
        found.extend(await log.wait({EVENTS: ORIGIN}, seconds=5))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.sleep(0.05)
        assert found == []
        entry_id = await log.append(b"now")
    assert found == [(EVENTS, Entry(entry_id, b"now"))]


async def test_everyone_who_waits_is_woken_on_either_stream(log):
    token, _ = await log.lead(5)
    found = []

    async def wait():
        found.append(await log.wait({EVENTS: ORIGIN, ANNOUNCEMENTS: ORIGIN}, seconds=5))

    with anyio.fail_after(3):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(wait)
            await anyio.sleep(0.05)
            await log.commit(
                Commit(token=token, after=ORIGIN, position="1-0", announcements=[("", b"a")])
            )
    assert [[(stream, one.payload) for stream, one in each] for each in found] == [
        [(ANNOUNCEMENTS, b"a")]
    ] * 3


async def test_what_a_thread_appends_wakes_who_waits(log, sync_log):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, sync_log.append, b"from a thread")
        with anyio.fail_after(3):
            [(_, entry)] = await log.wait({EVENTS: ORIGIN}, seconds=5)
    assert entry.payload == b"from a thread"
    assert sync_log.read() == [entry]
    assert sync_log.read(entry.id) == sync_log.read(stream=ANNOUNCEMENTS) == []


async def test_a_wait_takes_at_most_so_many_of_each_stream(log):
    for number in range(5):
        await log.append(bytes([number]))
    found = await log.wait({EVENTS: ORIGIN, ANNOUNCEMENTS: ORIGIN}, seconds=1, limit=3)
    assert payloads(entry for _, entry in found) == [b"\0", b"\1", b"\2"]


async def test_a_wait_for_nothing_returns_empty(log):
    assert await log.wait({EVENTS: ORIGIN}, seconds=0.05) == []


async def test_a_wait_can_be_cancelled(log):
    with anyio.move_on_after(0.05) as scope:
        await log.wait({EVENTS: ORIGIN}, seconds=5)
    assert scope.cancelled_caught


# Epochs and publishers


async def test_each_opening_takes_the_next_epoch_and_says_so_in_its_event(log):
    taken = []

    async def take():
        taken.append(await log.open_epoch(lambda epoch: b"%d" % epoch))

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(take)
    assert sorted(taken) == list(range(1, 11))
    assert [int(one) for one in payloads(await log.read())] == list(range(1, 11))


async def test_an_opening_that_fails_takes_no_epoch(log):
    def fail(epoch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await log.open_epoch(fail)
    assert await log.open_epoch(lambda epoch: b"first") == 1
    assert payloads(await log.read()) == [b"first"]


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
    sequences = [decode_envelope(entry.payload).sequence for entry in await log.read()]
    assert sequences == list(range(1, 201))


async def test_an_event_that_breaks_the_contract_is_refused_by_its_sender(log):
    publisher = AsyncPublisher(log, 1, new_producer("no slug"))
    with pytest.raises(ContractError, match=r"role"):
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
    assert await log.lead(5) == (0, pytest.approx(5, abs=0.5))
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
    [standing] = await log.standing()
    assert standing == ("step-ready/weights", announced)


async def test_what_stands_is_the_newest_of_its_subject_until_it_is_retracted(log):
    token, _ = await log.lead(5)
    first = [("a", b"a1"), ("", b"unnamed"), ("b", b"b1"), ("a", b"a2")]
    await log.commit(Commit(token=token, after=ORIGIN, position="1-0", announcements=first))
    assert {(one.subject, one.entry.payload) for one in await log.standing()} == {
        ("a", b"a2"),
        ("b", b"b1"),
    }
    # What a step announces stands, although the same step retracts what stood.
    step = Commit(
        token=token, after="1-0", position="2-0", announcements=[("a", b"a3")], retracted=["a", "b"]
    )
    await log.commit(step)
    assert [(one.subject, one.entry.payload) for one in await log.standing()] == [("a", b"a3")]
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


async def test_dead_letters_are_kept_with_their_reason(log):
    token, _ = await log.lead(5)
    letter = DeadLetter(Entry("9-0", b"\xff"), "not MessagePack")
    assert await log.commit(
        Commit(token=token, after=ORIGIN, position="9-0", dead_letters=[letter])
    )
    assert await log.dead_letters() == [letter]


async def test_a_lease_that_is_not_renewed_is_free(log):
    token, _ = await log.lead(0.3)
    assert not await log.renew(token + 1, 5)
    assert await log.renew(token, 0.3)
    await anyio.sleep(0.35)
    assert not await log.renew(token, 0.3)
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
    found = []

    async def member(name):
        found.extend(await log.read_group(EVENTS, "g", name, seconds=0.5))

    async with anyio.create_task_group() as tasks:
        for name in ("one", "two", "three"):
            tasks.start_soon(member, name)
        await anyio.sleep(0.05)
        await log.append(b"once")
    assert payloads(found) == [b"once"]


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
    assert await log.claim_idle(EVENTS, "g", "other", idle=5) == []
    await anyio.sleep(0.35)
    assert await log.claim_idle(EVENTS, "g", "other", idle=0.3, limit=1) == rest[:1]
    assert await log.claim_idle(EVENTS, "g", "third", idle=0.3) == rest[1:], "the other is fresh"
    for entry in rest:
        await log.ack(EVENTS, "g", entry.id)
        await log.ack(EVENTS, "g", entry.id)
    assert await log.claim_idle(EVENTS, "g", "other", idle=0) == []


async def test_a_group_that_was_never_created_is_an_error(log):
    with pytest.raises(redis.ResponseError, match="NOGROUP"):
        await log.read_group(EVENTS, "missing", "m", seconds=1)
    with pytest.raises(redis.ResponseError, match="NOGROUP"):
        await log.claim_idle(EVENTS, "missing", "m", idle=1)
    await log.ack(EVENTS, "missing", "1-0")


# Trimming


async def test_nothing_is_trimmed_that_a_group_still_needs(log):
    assert await log.trim(EVENTS, "5-0") == 0
    assert await log.first_left(EVENTS) is None
    ids = [await log.append(bytes([number])) for number in range(5)]
    await log.create_group(EVENTS, "g", ORIGIN)
    assert await log.trim(EVENTS, ids[4]) == 0
    assert await log.first_left(EVENTS) is None
    first, second = await log.read_group(EVENTS, "g", "m", seconds=1, limit=2)
    await log.ack(EVENTS, "g", first.id)
    assert await log.trim(EVENTS, ids[4]) == 1
    assert await log.first_left(EVENTS) == second.id
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

    def told(self, stream, found):
        return [(self.ids[stream].index(entry.id), entry.payload) for entry in found]

    async def play(self, turns):
        commands = [
            *(self.append, self.read, self.wait, self.commit, self.commit, self.lead),
            *(self.create_group, self.read_group, self.claim_idle, self.trim),
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
        found = await self.log.read(after, stream=stream, limit=limit, through=through)
        return self.told(stream, found)

    async def wait(self, turn, stream, after, group):
        found = await self.log.wait({stream: after}, seconds=0.001, limit=3)
        return self.told(stream, [entry for _, entry in found])

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
        taken = await self.log.commit(commit)
        self.folded = commit.position if taken else self.folded
        added = await self.log.read(self.ids[ANNOUNCEMENTS][-1], stream=ANNOUNCEMENTS)
        self.ids[ANNOUNCEMENTS] += [entry.id for entry in added]
        standing = [(s, *self.told(ANNOUNCEMENTS, [e])) for s, e in await self.log.standing()]
        return taken, sorted(standing), await self.log.load(), await self.log.dead_letters()

    async def lead(self, *_):
        kept = await self.log.renew(self.token, self.draw.choice([0, 60]))
        fresh, _ = await self.log.lead(60)
        self.token = fresh or self.token
        return kept, fresh

    async def create_group(self, turn, stream, after, group):
        await self.log.create_group(stream, group, after)

    async def read_group(self, turn, stream, after, group):
        found = await self.log.read_group(stream, group, "m", seconds=0.001, limit=4)
        for entry in found[::2]:
            await self.log.ack(stream, group, entry.id)
        return self.told(stream, found)

    async def claim_idle(self, turn, stream, after, group):
        found = await self.log.claim_idle(stream, group, "n", idle=0, limit=3)
        for entry in found[:1]:
            await self.log.ack(stream, group, entry.id)
        return self.told(stream, found)

    async def trim(self, turn, stream, after, group):
        dropped = await self.log.trim(stream, after) if self.draw.random() < 0.3 else 0
        first = await self.log.first_left(stream)
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
