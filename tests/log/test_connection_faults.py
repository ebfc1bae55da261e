"""Connections that break at an exact place, and servers that restart, hang or are full."""

import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count

import anyio
import pytest

from tests.chaos.boundaries import envelopes
from tests.support.errors import raises
from tests.support.event_histories import committed, registration
from tests.support.faulty_proxy import Proxy, command, script
from tests.support.pipeline import announced, publish_steps, reducer_task
from tests.support.waits import PATIENCE
from trinity_events import StepReady, subscribe
from trinity_events.archive import read_recording, record_run, verify
from trinity_events.core import Monitor, MonitorState
from trinity_events.errors import BufferFull, EventsMissing
from trinity_events.log import (
    AsyncPublisher,
    Publisher,
    RedisEventLog,
    Stream,
    SyncEventLog,
    before,
    new_producer,
    open_run,
)
from trinity_events.replay import current_state
from trinity_events.server import EmbeddedServer, connect, open_client
from trinity_schemas import decode_envelope

pytestmark = pytest.mark.server

PLACES = ["before", "within", "after"]
BOUND = 5.0
"""Seconds that publishing may take at most; half of a socket's deadline."""


@pytest.fixture
def proxy(redis_url):
    with Proxy(redis_url) as between:
        yield between


@pytest.fixture
def server(tmp_path):
    """A server of the test's own, to stop and start."""
    own = EmbeddedServer(tmp_path)
    with own.attached():
        yield own


@pytest.fixture
def publishing(run_id):
    """Makes publishers through a URL, which are ended with the test."""
    made = []

    def publisher(url, **bounds):
        client = open_client(url)
        made.append(Publisher(SyncEventLog(client, run_id), 1, new_producer("actor"), **bounds))
        return made[-1]

    yield publisher
    for open_publisher in made:
        with closing(open_publisher.log):
            open_publisher.close(PATIENCE)


def commit_steps(publisher, steps):
    """Publish what makes steps ready at once; returns the seconds for which that held us up."""
    began = time.monotonic()
    for step in steps:
        publisher.publish(committed(step, "state_dict", registration(expected=0)))
    return time.monotonic() - began


def appends(given):
    return bool(envelopes(given))


async def sequences(log):
    """What a producer's events are numbered, in the order of the log."""
    entries = await log.read(limit=100_000)
    return [decode_envelope(entry.payload).sequence for entry in entries]


async def assert_whole(log, count):
    """The log has each of a producer's events, in order; some, perhaps, again."""
    numbers = await sequences(log)
    assert list(dict.fromkeys(numbers)) == list(range(1, count + 1))
    monitor = Monitor(MonitorState(run_id=log.run_id))
    monitor.fold(await log.read(limit=100_000))
    assert "gap" not in monitor.state.anomaly_counts


# --- the proxy itself ------------------------------------------------------------------------


def ask(url, *words):
    """One command on a connection of its own; returns the reply, empty when it was cut."""
    host, _, port = url.removeprefix("redis://").rpartition(":")
    with (
        suppress(ConnectionResetError, BrokenPipeError),
        socket.create_connection((host, int(port)), PATIENCE) as connection,
    ):
        parts = [f"*{len(words)}", *(f"${len(word)}\r\n{word}" for word in words)]
        connection.sendall("\r\n".join([*parts, ""]).encode())
        return connection.recv(1024)
    return b""


@pytest.mark.parametrize(
    ("place", "done"), [("before", None), ("within", None), ("after", b"value")]
)
def test_the_proxy_cuts_at_the_place_of_the_command_that_it_is_told(
    proxy, sync_client, run_id, place, done
):
    fault = proxy.cut(place, command("SET"), nth=2)
    assert ask(proxy.url, "SET", f"{run_id}-first", "value") == b"+OK\r\n"
    assert ask(proxy.url, "SET", f"{run_id}-second", "value") == b""
    assert fault.struck.is_set()
    assert sync_client.get(f"{run_id}-second") == done
    assert ask(proxy.url, "SET", f"{run_id}-second", "value") == b"+OK\r\n"  # it strikes once


def test_the_proxy_refuses_and_heals(proxy):
    proxy.refuse()
    assert ask(proxy.url, "PING") == b""
    proxy.heal()
    assert ask(proxy.url, "PING") == b"+PONG\r\n"


def test_the_proxy_swallows_what_it_is_sent_until_it_heals(proxy, sync_client, run_id):
    proxy.swallow()
    threading.Timer(2.0, proxy.heal).start()
    assert ask(proxy.url, "SET", run_id, "value") == b""
    assert sync_client.get(run_id) is None


def test_the_proxy_listens_on_a_socket_too_and_lets_big_replies_through(
    redis_url, sync_client, run_id, tmp_path
):
    sync_client.set(run_id, b"x" * (1 << 20))
    with Proxy(redis_url, tmp_path / "p.sock") as between, open_client(between.url) as client:
        assert client.get(run_id) == b"x" * (1 << 20)
        assert client.mget(run_id, "nothing")[1] is None


# --- a connection that is cut ----------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
async def test_a_publisher_that_is_cut_off_loses_nothing_and_keeps_its_order(
    proxy, publishing, log, place
):
    publisher = publishing(proxy.url)
    faults = [proxy.cut(place, appends, nth=nth) for nth in (1, 3)]
    for _ in range(3):
        commit_steps(publisher, range(10))
        await anyio.to_thread.run_sync(publisher.flush, PATIENCE)
    assert all(fault.struck.is_set() for fault in faults)
    await assert_whole(log, 30)


@pytest.mark.parametrize("place", PLACES)
async def test_an_asynchronous_publisher_that_is_cut_off_confirms_all_the_same(proxy, log, place):
    fault = proxy.cut(place, appends, nth=2)
    async with connect(proxy.url) as client:
        through = RedisEventLog(client, log.run_id)
        publisher = AsyncPublisher(through, 1, new_producer("trainer"))
        ids = [await publisher.publish(committed(step, "weights")) for step in range(3)]
    assert fault.struck.is_set()
    await assert_whole(log, 3)
    assert set(ids) <= {entry.id for entry in await log.read()}


@pytest.mark.parametrize("place", PLACES)
async def test_a_run_that_is_opened_over_a_cut_connection_is_open(proxy, log, run_id, place):
    fault = proxy.cut(place, script(":epoch"))
    async with connect(proxy.url) as client:
        epoch = await open_run(client, run_id)
    assert fault.struck.is_set()
    newest = (await log.read())[-1]
    # After a lost reply it is not known whether the first epoch was taken: another one is.
    assert decode_envelope(newest.payload).epoch == epoch == (2 if place == "after" else 1)


@pytest.mark.parametrize("place", PLACES)
async def test_a_reducer_that_is_cut_off_in_its_commit_announces_everything_once(
    proxy, publisher, log, run_id, place
):
    faults = [proxy.cut(place, script(":position"), nth=nth) for nth in (1, 3)]
    async with reducer_task(proxy.url, run_id):
        for step in range(4):
            await publish_steps(publisher, [step])
            await announced(log, step + 1 + max(0, step - 1))
    assert all(fault.struck.is_set() for fault in faults)
    announcements = await announced(log, 6)
    assert [event.step for event in announcements if isinstance(event, StepReady)] == [0, 1, 2, 3]
    assert len(announcements) == 6  # two versions were retired, once each


@pytest.mark.parametrize("place", PLACES)
async def test_a_follower_that_is_cut_off_misses_nothing_and_hears_nothing_twice(
    proxy, publisher, log, redis_url, run_id, place
):
    fault = proxy.cut(place, command("XREAD", log.keys.announcements), nth=2)
    heard = []
    async with (
        reducer_task(redis_url, run_id),
        subscribe(
            run_id, StepReady, start="beginning", redis_url=proxy.url, deadline=PATIENCE
        ) as events,
    ):
        for step in range(4):
            await publish_steps(publisher, [step])
            heard.append((await anext(aiter(events))).step)
    assert fault.struck.is_set()
    assert heard == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["XREADGROUP", "XACK"])
@pytest.mark.parametrize("place", PLACES)
async def test_a_member_of_a_group_that_is_cut_off_handles_everything_at_least_once(
    proxy, publisher, log, client, redis_url, run_id, place, name
):
    fault = proxy.cut(place, command(name, log.keys.announcements), nth=2)
    heard = []
    async with (
        reducer_task(redis_url, run_id),
        subscribe(
            *(run_id, StepReady),
            **{"group": "eval", "start": "beginning", "redis_url": proxy.url},
            **{"claim_after": 0.2, "deadline": PATIENCE},
        ) as events,
    ):
        await publish_steps(publisher, range(4))
        async for event in events:
            heard.append(event.step)
            await event.ack()
            if set(heard) == {0, 1, 2, 3}:
                break
    assert fault.struck.is_set()
    pending = await client.xpending_range(log.keys.announcements, "eval", "-", "+", 100)
    # An entry of another type, in a reply that was lost, stays pending: no member waits for it.
    for entry_id in [entry["message_id"].decode() for entry in pending]:
        [entry] = await log.read(
            before(entry_id), stream=Stream.ANNOUNCEMENTS, through=entry_id, limit=1
        )
        assert not isinstance(decode_envelope(entry.payload).event, StepReady)


# --- a server that is away, slow or full -------------------------------------------------------


@contextmanager
def restarting(server, between):
    server._stop()
    try:
        yield
    finally:
        server._start()


@contextmanager
def full(server, between):
    with open_client(server.url) as admin:
        admin.config_set("maxmemory", 1)
        try:
            yield
        finally:
            admin.config_set("maxmemory", 0)


@contextmanager
def hanging(server, between):
    between.swallow()
    try:
        yield
    finally:
        between.heal()


@contextmanager
def refusing(server, between):
    between.refuse()
    try:
        yield
    finally:
        between.heal()


@contextmanager
def slow(server, between):
    between.delay(0.05)
    yield


@pytest.mark.parametrize("outage", [restarting, full, hanging, refusing, slow])
async def test_through_an_outage_nothing_is_lost_or_told_twice_and_nobody_is_held_up(
    server, publishing, run_id, tmp_path, outage
):
    heard = {"follower": [], "group": []}

    async def listen(who, **options):
        options |= {"start": "beginning", "redis_url": between.url, "claim_after": 0.5}
        async with subscribe(run_id, StepReady, **options) as events:
            async for event in events:
                await event.ack()
                heard[who].append(event.step)

    async def everything(count):
        with anyio.fail_after(PATIENCE):
            while any(set(steps) != set(range(count)) for steps in heard.values()):
                await anyio.sleep(0.01)

    with Proxy(server.url, tmp_path / "proxy.sock") as between:
        async with connect(between.url) as client:
            await open_run(client, run_id)
        publisher = publishing(between.url)
        async with reducer_task(between.url, run_id), anyio.create_task_group() as tasks:
            tasks.start_soon(listen, "follower")
            tasks.start_soon(partial(listen, group="eval"), "group")
            commit_steps(publisher, range(10))
            await everything(10)
            with outage(server, between):
                assert commit_steps(publisher, range(10, 20)) < BOUND
                await anyio.sleep(0.3)  # for the others to notice
            await everything(20)
            tasks.cancel_scope.cancel()
    assert heard["follower"] == list(range(20))
    async with connect(server.url) as client:
        log = RedisEventLog(client, run_id)
        assert [event.step for event in await announced(log, 20)] == list(range(20))
        assert "gap" not in (await current_state(log)).anomaly_counts
        [group] = await client.xinfo_groups(log.keys.announcements)
        assert group["pending"] == 0


async def test_a_busy_run_is_looked_at_and_exported_over_a_slow_network(
    publisher, redis_url, run_id, proxy, tmp_path
):
    path = tmp_path / "run.jsonl"

    async def train():
        for step in count():
            await publish_steps(publisher, [step])

    async with (
        reducer_task(redis_url, run_id),
        connect(proxy.url) as far,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(train)
        proxy.delay(0.05)
        with anyio.fail_after(PATIENCE):
            state = await current_state(RedisEventLog(far, run_id))
            await record_run(RedisEventLog(far, run_id), path)
        tasks.cancel_scope.cancel()
    report = verify(read_recording(path))
    assert report.sound, report.findings
    assert report.entries > state.entries > 0


@pytest.mark.parametrize("outage", [restarting, full, hanging])
async def test_training_is_told_when_the_bound_is_reached_and_is_not_held_up(
    server, publishing, run_id, tmp_path, outage
):
    with Proxy(server.url, tmp_path / "proxy.sock") as between:
        publisher = publishing(between.url, capacity=5)
        with outage(server, between):
            assert commit_steps(publisher, range(5)) < BOUND
            began = time.monotonic()
            with raises(BufferFull, backlog=5):
                commit_steps(publisher, [5])
            assert time.monotonic() - began < BOUND
        await anyio.to_thread.run_sync(publisher.flush, PATIENCE)
        commit_steps(publisher, [6])
        publisher.flush(PATIENCE)
    async with connect(server.url) as client:
        # What was not taken used up no number: the fold sees no gap.
        await assert_whole(RedisEventLog(client, run_id), 6)


async def test_a_publisher_says_in_time_what_a_hanging_server_did_not_take(
    proxy, publishing, run_id
):
    publisher = publishing(proxy.url)
    with hanging(None, proxy):
        commit_steps(publisher, [1])
        with raises(EventsMissing, run_id=run_id, count=1, deadline=0.2):
            publisher.flush(0.2)
    publisher.flush(PATIENCE)
