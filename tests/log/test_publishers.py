"""Publishers and a server that is away, slow, full, read-only, or refuses what they send.

The numbers are those of the invariants in `trinity_events/log/publishing/publisher.py`.
"""

import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
from itertools import islice

import anyio
import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.errors import assert_attributes, raises
from tests.support.event_histories import committed
from tests.support.waits import PATIENCE, wait_until
from trinity_events.errors import (
    BufferFull,
    EventsMissing,
    PermissionDenied,
    PublishError,
    ServerUnreachable,
)
from trinity_events.log import (
    AsyncPublisher,
    Publisher,
    RedisEventLog,
    SyncEventLog,
    new_producer,
    open_run,
)
from trinity_events.log.publishing.publisher import CLOSED, EXITING, Outbox
from trinity_events.log.retry import CONNECTION_ERRORS, SLOW, backoff_delays, is_transient
from trinity_events.server import EmbeddedServer, connect, open_client
from trinity_events.server.clients import async_plain_client, plain_client
from trinity_events.server.url import parse
from trinity_schemas import ContractError, decode_envelope, heartbeat_key

pytestmark = pytest.mark.server
NOT_PUBLISHED = "step-committed of run {} was not published"


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("TRINITY_HOME", str(tmp_path))
    own = EmbeddedServer(tmp_path)
    with own.attached():
        yield own


def client_of(server, **options):
    """A client that tries once: the tests are about what is done beyond that."""
    retry = Retry(NoBackoff(), 0)
    return redis.Redis(
        unix_socket_path=str(server.socket), protocol=2, retry=retry, socket_timeout=10, **options
    )


@pytest.fixture
def admin(server):
    with client_of(server) as client:
        yield client


@pytest.fixture
def log(admin, run_id):
    return SyncEventLog(admin, run_id)


@pytest.fixture
def publishing(log, request):
    """Makes publishers on a connection of their own, whose threads end with the test."""
    made = []

    def make(client=None, **bounds):
        own = log if client is None else SyncEventLog(client, log.run_id)
        made.append(Publisher(own, 1, new_producer("actor"), **bounds))
        return made[-1]

    yield make
    for publisher in made:
        if publisher.backlog:
            with pytest.raises(PublishError):
                publisher.close(0)
        else:
            publisher.close(PATIENCE)


@pytest.fixture
async def patient(server):
    """An asynchronous client that tries once."""
    async with redis.asyncio.Redis(
        unix_socket_path=str(server.socket), protocol=2, retry=AsyncRetry(NoBackoff(), 0)
    ) as client:
        yield client


def sequences(log):
    """The numbers of what is in the log, as the fold counts them: without what came twice."""
    numbers = [decode_envelope(entry.payload).sequence for entry in log.read(limit=100_000)]
    return list(dict.fromkeys(numbers))


def up_to(last):
    return list(range(1, last + 1))


def wait_for_a_fault(publisher):
    """Wait until an attempt to send has failed, so that a flush can say why."""
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: publisher._fault is not None, PATIENCE)


# What passes, and how long to wait for it


@pytest.mark.parametrize(
    ("error", "does"),
    [
        (redis.ConnectionError("Connection refused"), True),
        (redis.TimeoutError("Timeout reading"), True),
        (redis.BusyLoadingError("loading the dataset"), True),
        (redis.OutOfMemoryError("used memory > 'maxmemory'"), True),
        (redis.ReadOnlyError("a read only replica"), True),
        (redis.exceptions.ClusterDownError("The cluster is down"), True),
        (redis.exceptions.RedisClusterException("Redis Cluster cannot be connected"), True),
        (redis.ResponseError("MISCONF errors writing to the AOF file"), True),
        (redis.ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (BrokenPipeError(), True),
        (redis.AuthenticationError("invalid password"), False),
        (redis.exceptions.NoPermissionError("no permissions to run"), False),
        (redis.ResponseError("WRONGTYPE Operation against a key"), False),
        (redis.ResponseError("BUSYGROUP Consumer Group name already exists"), False),
        (ValueError("something else"), False),
    ],
)
def test_faults_that_pass_are_told_from_refusals(error, does):
    assert is_transient(error) is does
    assert not does or isinstance(error, (*CONNECTION_ERRORS, redis.ResponseError))


def test_pauses_spread_over_a_span_that_grows_to_its_bound():
    many = [list(islice(backoff_delays(0.4), 8)) for _ in range(200)]
    for turn, span in enumerate([0.05, 0.1, 0.2, 0.4, 0.4, 0.4, 0.4, 0.4]):
        drawn = [each[turn] for each in many]
        assert 0 <= min(drawn) < span / 4
        assert span * 3 / 4 < max(drawn) <= span
    assert max(islice(backoff_delays(0.01), 100)) <= 0.01


async def test_an_outage_draws_nothing_from_the_generator_of_the_users_code(tmp_path):
    absent = f"unix://{tmp_path}/absent"
    state = random.getstate()
    with raises(ServerUnreachable):
        open_client(absent, patience=0.1)
    with raises(ServerUnreachable):
        async with connect(absent, patience=0.1):
            pass
    with plain_client(parse(absent)) as client, pytest.raises(redis.ConnectionError):
        client.ping()
    async with async_plain_client(parse(absent), retry=True) as client:
        with pytest.raises(redis.ConnectionError):
            await client.ping()
    assert random.getstate() == state


@pytest.mark.processes
def test_processes_that_are_forked_do_not_retry_at_the_same_moments():
    def draw(pipe):
        pipe.send(list(islice(backoff_delays(0.4), 8)))

    context = multiprocessing.get_context("fork")
    delays = []
    for _ in range(2):
        reader, writer = context.Pipe(duplex=False)
        child = context.Process(target=draw, args=(writer,))
        child.start()
        delays.append(reader.recv())
        child.join(PATIENCE)
    assert delays[0] != delays[1]


# The queue


def test_an_outbox_keeps_what_was_sent_until_it_is_taken():
    outbox = Outbox(1000, 1000)
    for number in range(600):
        assert outbox.put(b"%d" % (number % 10))
    batch = outbox.batch()
    assert batch == outbox.batch() == [b"%d" % (n % 10) for n in range(512)]
    outbox.drop(len(batch))
    assert (len(outbox), outbox.confirmed, outbox.accepted) == (88, 512, 600)
    assert len(outbox.batch()) == 88


def test_an_outbox_is_bounded_by_number_and_by_bytes():
    """Invariant 4."""
    outbox = Outbox(2, 10)
    assert not outbox.put(b"x" * 11)
    assert outbox.put(b"x" * 5)
    assert not outbox.put(b"x" * 6)
    assert outbox.put(b"x" * 5)
    assert not outbox.put(b"")
    outbox.drop(1)
    assert outbox.put(b"x" * 5)
    assert outbox.accepted == 3


def test_an_outbox_sends_no_more_bytes_at_once_than_a_server_takes_in_a_moment():
    outbox = Outbox(1000, 1 << 30)
    for _ in range(3):
        outbox.put(b"x" * (1 << 19))
    outbox.put(b"x" * (1 << 22))
    assert len(outbox.batch()) == 2
    outbox.drop(3)
    assert len(outbox.batch()) == 1, "one that is larger is sent alone"


# A server that is away


def test_what_is_published_while_the_server_is_away_comes_later_and_in_order(
    server, log, publishing
):
    publisher = publishing()
    server._stop()
    for _ in range(1500):
        publisher.publish(committed(1))
    assert publisher.backlog == 1500
    server._start()
    publisher.flush(PATIENCE)
    assert publisher.backlog == 0
    assert sequences(log) == up_to(1500)


def test_nothing_is_lost_and_all_is_in_order_over_restarts_under_many_threads(
    server, log, publishing
):
    """Invariant 2."""
    publisher = publishing()
    stop, published = threading.Event(), []

    def publish():
        while not stop.is_set() and publisher.backlog < 2000:
            publisher.publish(committed(1))
            published.append(1)
            stop.wait(0.001)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        publisher.flush(PATIENCE)
        server._stop()
        server._start()
    stop.set()
    for thread in threads:
        thread.join()
    publisher.flush(PATIENCE)
    assert sequences(log) == up_to(len(published))


def test_at_its_bound_a_publisher_says_so_and_what_it_did_not_take_leaves_no_gap(
    server, log, publishing
):
    """Invariants 1 and 4."""
    publisher = publishing(capacity=10)
    server._stop()
    for _ in range(10):
        publisher.publish(committed(1))
    with raises(BufferFull, run_id=log.run_id, what=NOT_PUBLISHED.format(log.run_id), backlog=10):
        publisher.publish(committed(1))
    server._start()
    publisher.flush(PATIENCE)
    publisher.publish(committed(1))
    publisher.flush(PATIENCE)
    assert sequences(log) == up_to(11)


def test_an_event_that_is_larger_than_all_that_may_be_kept_is_refused_at_once(publishing):
    with raises(BufferFull, backlog=0):
        publishing(capacity_bytes=10).publish(committed(1))


def test_a_flush_names_how_many_events_of_which_run_are_missing_and_why(
    server, admin, log, publishing
):
    publisher = publishing()
    admin.ping()
    server._stop()
    for _ in range(3):
        publisher.publish(committed(1))
    wait_for_a_fault(publisher)
    away = re.compile(r"redis\.sock")
    with raises(EventsMissing, run_id=log.run_id, count=3, deadline=0.2, reason=away):
        publisher.flush(0.2)
    server._start()
    publisher.flush(PATIENCE)
    assert sequences(log) == up_to(3)


def test_a_slow_server_is_told_from_one_that_is_away(admin, log, publishing):
    publisher = publishing()
    publisher.flush(PATIENCE)
    admin.client_pause(60_000, all=False)
    publisher.publish(committed(1))
    with raises(EventsMissing, deadline=0.1, reason=SLOW):
        publisher.flush(0.1)
    admin.client_unpause()
    publisher.flush(PATIENCE)
    assert sequences(log) == [1]


# A server that takes nothing


def full(admin):
    admin.config_set("maxmemory", 1)


def has_room(admin):
    admin.config_set("maxmemory", 0)


def read_only(admin):
    admin.replicaof("127.0.0.1", "1")


def writable(admin):
    admin.replicaof("NO", "ONE")


@pytest.mark.parametrize(
    ("fail", "mend", "why"),
    [(full, has_room, "maxmemory"), (read_only, writable, "read only replica")],
)
def test_a_server_that_is_full_or_read_only_is_waited_for(admin, log, publishing, fail, mend, why):
    publisher = publishing()
    publisher.publish(committed(1))
    publisher.flush(PATIENCE)
    fail(admin)
    for _ in range(5):
        publisher.publish(committed(1))
    wait_for_a_fault(publisher)
    with raises(EventsMissing, count=5, reason=re.compile(why)):
        publisher.flush(0.3)
    mend(admin)
    publisher.flush(PATIENCE)
    assert sequences(log) == up_to(6)


def test_a_server_that_becomes_full_in_the_middle_of_a_batch_takes_all_of_it_or_nothing(admin, log):
    log.append(b"")
    room = admin.info("memory")["used_memory"] + 5_000_000
    admin.config_set("maxmemory", room)

    def append_for_ever():
        for _ in range(100):
            log.append_many([b"x" * 10_000] * 100)

    with pytest.raises(redis.OutOfMemoryError):
        append_for_ever()
    has_room(admin)
    accepted = len(log.read(limit=10_000)) - 1
    assert accepted > 0
    assert accepted % 100 == 0


def test_what_the_server_refuses_is_said_and_kept_until_it_is_allowed(
    server, admin, log, publishing
):
    admin.execute_command("ACL", "SETUSER", "weak", "on", ">word", "~*", "+@all", "-xadd")
    with client_of(server, username="weak", password="word") as client:
        publisher = publishing(client)
        publisher.publish(committed(1))
        refusal = re.compile("xadd|run this command")
        with raises(EventsMissing, count=1, deadline=None, reason=refusal):
            publisher.flush(PATIENCE)
        with raises(PublishError, what=NOT_PUBLISHED.format(log.run_id), reason=refusal):
            publisher.publish(committed(1))
        admin.execute_command("ACL", "SETUSER", "weak", "+xadd")
        publisher.flush(PATIENCE)
        publisher.publish(committed(1))
        publisher.flush(PATIENCE)
        assert sequences(log) == up_to(2)


def test_an_event_that_breaks_the_contract_is_refused_at_once_and_uses_up_no_number(
    log, publishing
):
    publisher = publishing()
    with pytest.raises(ContractError):
        publisher.publish(committed(-1))
    publisher.publish(committed(1))
    publisher.flush(PATIENCE)
    assert sequences(log) == [1]


# The end


def threads_of(publisher):
    return [thread for thread in threading.enumerate() if thread is publisher._thread]


def test_a_publisher_that_is_closed_has_sent_all_and_takes_no_more(log, publishing):
    publisher = publishing()
    for _ in range(600):
        publisher.publish(committed(1))
    publisher.close(PATIENCE)
    assert sequences(log) == up_to(600)
    assert publisher._thread is None
    with raises(PublishError, reason=CLOSED):
        publisher.publish(committed(1))
    publisher.close(PATIENCE)


def test_closing_while_the_server_is_away_says_what_is_lost_and_ends_the_thread(server, publishing):
    """Invariant 3."""
    publisher = publishing()
    server._stop()
    publisher.publish(committed(1))
    with raises(EventsMissing, count=1):
        publisher.close(0.2)
    [*threads] = threads_of(publisher)
    for thread in threads:
        thread.join(PATIENCE)
    assert publisher._thread is None
    with raises(EventsMissing, count=1):
        publisher.flush(3600)  # nothing is tried any more, so it is said at once
    server._start()


def test_a_publisher_that_nothing_refers_to_keeps_no_thread(log):
    publisher = Publisher(log, 1, new_producer("actor"), linger=0.01)
    for _ in range(3):
        publisher.publish(committed(1))
    publisher.flush(PATIENCE)
    [thread] = threads_of(publisher)
    del publisher
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert sequences(log) == up_to(3)


def test_a_process_that_ends_refuses_what_no_thread_can_send(log, publishing, monkeypatch):
    monkeypatch.setattr("sys.is_finalizing", lambda: True)
    publisher = publishing()
    with raises(PublishError, reason=EXITING):
        publisher.publish(committed(1))
    monkeypatch.undo()
    publisher.publish(committed(1))
    publisher.flush(PATIENCE)
    assert sequences(log) == [1]


PROCESS = """
import os, sys, threading, time
import redis
import trinity_events.log.publishing.publisher as module
from tests.support.event_histories import committed
from trinity_events.errors import PublishError
from trinity_events.log import Publisher, SyncEventLog, new_producer

socket, run_id = sys.argv[1:3]
module.EXIT_DEADLINE = float(sys.argv[3])
client = redis.Redis(unix_socket_path=socket, protocol=2)
publisher = Publisher(SyncEventLog(client, run_id), 1, new_producer("actor"))
publisher.publish(committed(1))

def save():
    threading.main_thread().join()
    for _ in range(99):
        publisher.publish(committed(1))

if os.fork() == 0:
    try:
        publisher.publish(committed(1))
    except PublishError as error:
        print("the child:", error, flush=True)
    sys.exit()
threading.Thread(target=save).start()
"""


def ended(server, run_id, deadline):
    return subprocess.run(
        [sys.executable, "-c", PROCESS, str(server.socket), run_id, str(deadline)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.processes
def test_a_process_that_ends_sends_what_its_last_threads_published(server, log):
    result = ended(server, log.run_id, PATIENCE)
    assert sequences(log) == up_to(100)
    assert "the child: a publisher of run" in result.stdout
    assert result.stderr == ""


@pytest.mark.processes
def test_a_process_that_ends_without_a_server_does_not_wait_for_ever_and_says_what_is_lost(
    server, log
):
    server._stop()
    result = ended(server, log.run_id, 0.2)
    assert f"this process ends: in run {log.run_id}, 100 events are not" in result.stderr
    server._start()


# Asynchronous code


async def test_an_asynchronous_publisher_waits_out_a_restart_in_order(server, log, patient):
    publisher = AsyncPublisher(RedisEventLog(patient, log.run_id), 1, new_producer("trainer"))
    await publisher.publish(committed(1))
    await anyio.to_thread.run_sync(server._stop)
    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(publisher.publish, committed(1))
        await anyio.sleep(0.1)
        await anyio.to_thread.run_sync(server._start)
    assert sequences(log) == up_to(11)


async def test_an_asynchronous_publisher_says_after_its_deadline_what_was_not_taken(
    server, admin, log, patient
):
    producer = new_producer("trainer")
    publisher = AsyncPublisher(RedisEventLog(patient, log.run_id), 1, producer, deadline=1.0)
    full(admin)
    what, full_server = NOT_PUBLISHED.format(log.run_id), re.compile("maxmemory")
    with raises(PublishError, what=what, deadline=1.0, reason=full_server):
        await publisher.publish(committed(1))
    has_room(admin)
    admin.client_pause(60_000, all=False)
    with raises(PublishError, deadline=1.0, reason=SLOW):
        await publisher.publish(committed(1))
    admin.client_unpause()
    publisher._deadline = PATIENCE
    await publisher.publish(committed(1))
    # What may have reached the server keeps its number: the gap tells that it may be missing.
    assert sequences(log)[-1] == 3


async def test_publishers_that_wait_for_one_another_all_keep_their_deadline(admin, log, patient):
    producer = new_producer("trainer")
    publisher = AsyncPublisher(RedisEventLog(patient, log.run_id), 1, producer, deadline=PATIENCE)
    await publisher.publish(committed(1))
    publisher._deadline = 1.0
    admin.client_pause(60_000, all=False)
    errors = []

    async def publish():
        with raises(PublishError, run_id=log.run_id) as caught:
            await publisher.publish(committed(1))
        errors.append(caught.value)

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(publish)
    tried = len([error for error in errors if error.deadline is not None])
    assert tried >= 1
    assert len(errors) == 100
    admin.client_unpause()
    publisher._deadline = PATIENCE
    await publisher.publish(committed(1))
    assert sequences(log)[-1] == tried + 2, "those that were never sent leave no gap"


async def test_what_is_refused_for_good_is_said_at_once_and_leaves_no_gap(admin, log, patient):
    publisher = AsyncPublisher(RedisEventLog(patient, log.run_id), 1, new_producer("trainer"))
    admin.set(log.keys.events, "not a stream")
    with anyio.fail_after(PATIENCE), raises(PublishError, deadline=None) as caught:
        await publisher.publish(committed(1))
    assert_attributes(caught.value.__cause__, key=log.keys.events, actual="string")
    admin.delete(log.keys.events)
    await publisher.publish(committed(1))
    assert sequences(log) == [1]


async def test_opening_a_run_waits_out_a_restart(server, patient, run_id):
    await anyio.to_thread.run_sync(server._stop)
    opened = []

    async def open_it():
        opened.append(await open_run(patient, run_id))

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_it)
            await anyio.sleep(0.1)
            assert opened == []
            await anyio.to_thread.run_sync(server._start)
    assert opened == [1]


async def test_opening_a_run_ends_at_its_deadline_or_at_a_refusal(server, admin, patient, run_id):
    full(admin)
    with raises(PublishError, run_id=run_id, deadline=0.2):
        await open_run(patient, run_id, deadline=0.2)
    has_room(admin)
    admin.execute_command("ACL", "SETUSER", "default", "-xadd")
    with raises(PermissionDenied, run_id=run_id, fault="opening", reason=re.compile("xadd")):
        await open_run(patient, run_id)


def test_a_closed_log_keeps_no_connection_of_a_thread_that_ends_its_heartbeat_later(
    redis_url, sync_client, run_id
):
    def connected():
        return run_id in [connection["name"] for connection in sync_client.client_list()]

    log = SyncEventLog(redis.Redis.from_url(redis_url, client_name=run_id), run_id)
    log.renew_heartbeat("a", 9.0)
    assert connected()
    log.close()
    log.clear_heartbeat("a")
    wait_until(lambda: not connected())
    assert not sync_client.exists(heartbeat_key(run_id, "a"))
