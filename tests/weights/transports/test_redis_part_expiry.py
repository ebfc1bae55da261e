"""How long parts last on a server: as long as they are published, and read."""

import threading
from contextlib import closing
from unittest import mock

import anyio
import pytest
import redis

from tests.support.pipeline import until
from tests.support.published_parts import put
from tests.support.transport_processes import CHUNK, Where
from tests.support.waits import PATIENCE
from trinity_events.server import open_client
from trinity_events.weights.transports.redis import expiry
from trinity_events.weights.transports.redis.leases import LONGEST
from trinity_events.weights.transports.redis.store import RedisChunkStore, _ReceiveMemory
from trinity_schemas import chunk_key, leases_key, manifest_key

SIZES = [CHUNK] * 5 + [24_160 - 5 * CHUNK]
"""Of six tensors of 4,000 bytes, aligned."""


@pytest.fixture
def client(weights_url):
    with open_client(weights_url) as made:
        yield made


@pytest.fixture
def ours(weights_url):
    made = Where("redis", weights_url).store()
    yield made
    made.close()


@pytest.fixture
def theirs(weights_url):
    made = Where("redis", weights_url).store()
    yield made
    made.close()


@pytest.fixture
def often(weights_url):
    """A publisher that renews what it keeps fifty times a second."""
    renewals = 50 * expiry.ORPHANED_AFTER
    with closing(RedisChunkStore(open_client(weights_url), renewals=renewals)) as store:
        yield store


def keys_of(part) -> list[str]:
    return [manifest_key(*part), *(chunk_key(*part, index) for index in range(len(SIZES)))]


def there(source) -> list[bool]:
    """Of each chunk, whether it is."""
    arrived = []
    source.read(SIZES, lambda index, data, digested=None: arrived.append(data is not None))
    return arrived


def test_a_lease_is_renewed_by_what_is_read(ours, theirs, part, client):
    put(ours, part)
    with mock.patch("trinity_events.weights.transports.redis.leases.time.monotonic") as clock:
        clock.return_value = 100.0
        source = theirs.open(part)
        renewed = []

        def check(index, data, digested=None):
            renewed.append(client.delete(leases_key(*part)))
            clock.return_value += 6.0

        source.read(SIZES, check)
    # Taken by opening it; then whenever ten seconds of its thirty have passed.
    assert renewed == [1, 0, 1, 0, 1, 0]
    source.close()


def test_what_is_read_of_one_part_renews_the_leases_of_all_that_are_open(
    ours, theirs, part, client
):
    other = part._replace(rank=1)
    put(ours, part)
    put(ours, other)
    with mock.patch("trinity_events.weights.transports.redis.leases.time.monotonic") as clock:
        clock.return_value = 100.0
        source, waiting = theirs.open(part), theirs.open(other)
        client.delete(leases_key(*other))
        clock.return_value += 10.0
        assert all(there(source))
        assert client.exists(leases_key(*other))
        waiting.close()
        clock.return_value += 10.0
        assert all(there(source))
    assert not client.exists(leases_key(*other))
    source.close()


def test_a_lease_ends_by_the_servers_clock_and_its_key_with_it(theirs, part, client, ours):
    put(ours, part)
    source = theirs.open(part)
    seconds, microseconds = client.time()
    [(_, until)] = client.zrange(leases_key(*part), 0, -1, withscores=True)
    assert 0 < until / 1000 - seconds - microseconds / 1e6 <= 30
    assert 0 < client.pttl(leases_key(*part)) <= 30_000
    source.close()
    assert not client.exists(leases_key(*part))


def test_readers_that_hang_keep_two_versions_at_most(ours, theirs, part, client):
    sources = []
    for step in range(4):
        put(ours, part._replace(step=step))
        sources.append(theirs.open(part._replace(step=step)))
        ours.delete(part._replace(step=step))
    assert 0 < client.pttl(chunk_key(*part._replace(step=3), 0)) <= 1000 * LONGEST
    assert [there(source) for source in sources] == [[False] * 6] * 2 + [[True] * 6] * 2
    for source in sources:
        source.close()
    ours.begin(part)
    assert not client.keys(f"trinity-weights:{{{part.run_id}.*")


def test_what_is_not_read_is_freed_at_once_and_no_lease_stays(ours, theirs, part, client):
    put(ours, part)
    theirs.open(part).close()
    ours.delete(part)
    assert theirs.open(part) is None
    assert not client.keys(f"trinity-weights:{{{part.run_id}.*")


def test_a_lease_that_cannot_be_ended_is_left_to_end_by_itself(ours, theirs, part):
    put(ours, part)
    source = theirs.open(part)
    with mock.patch.object(redis.Redis, "zrem", side_effect=redis.ConnectionError):
        source.close()


def test_a_part_that_is_published_anew_is_not_freed_with_what_it_was(ours, theirs, part):
    put(ours, part)
    with closing(theirs.open(part)):
        ours.delete(part)
        put(ours, part)
    ours.begin(part._replace(step=2))
    assert all(there(theirs.open(part)))


def test_memory_of_several_parts_makes_room_for_larger_ones():
    memory = _ReceiveMemory()
    small, large = memory.acquire(5), memory.acquire(10)
    memory.release(small)
    memory.release(large)
    assert len(memory.acquire(20)) == 20
    assert len(memory.acquire(3)) == 5, "the largest alone made room"


async def test_what_is_published_does_not_expire_while_its_publisher_lives(often, part, client):
    with closing(often) as store:
        put(store, part)
        for key in keys_of(part):
            client.expire(key, 100)
        await until(lambda: all(client.ttl(key) > 100 for key in keys_of(part)))
        store.delete(part)
        assert client.exists(*keys_of(part)) == 0
        put(store, part)
    for key in keys_of(part):
        client.expire(key, 100)
    await anyio.sleep(0.2)
    assert all(0 < client.ttl(key) <= 100 for key in keys_of(part)), "it ended, and left them"


async def test_of_what_nobody_retires_the_newest_are_kept_and_what_they_rest_on(
    often, part, client
):
    def manifest_of(step):
        return manifest_key(*part._replace(step=step))

    full, *others = (part._replace(step=step) for step in range(10))
    for version in (full, *others):
        sink = often.begin(version)
        sink.seal(b"a manifest", None if version == full else full)
    for step in range(10):
        client.expire(manifest_of(step), 100)
    newest = [0, *range(10 - expiry.MOST, 10)]
    await until(lambda: all(client.ttl(manifest_of(step)) > 100 for step in newest))
    await anyio.sleep(0.2)
    lasting = [step for step in range(10) if client.ttl(manifest_of(step)) > 100]
    assert lasting == newest


async def test_what_cannot_be_renewed_is_tried_again(often, part, client):
    with closing(often) as store:
        with mock.patch.object(
            store._keeping, "_renew", side_effect=redis.ConnectionError
        ) as renew:
            put(store, part)
            await until(lambda: renew.call_count > 1)
        client.expire(manifest_key(*part), 100)
        await until(lambda: client.ttl(manifest_key(*part)) > 100)


def test_no_renewal_is_under_way_once_they_are_stopped(part):
    begun, released = threading.Event(), threading.Event()
    client = mock.MagicMock()

    def execute():
        begun.set()
        assert released.wait(PATIENCE)

    client.pipeline.return_value.__enter__.return_value.execute.side_effect = execute
    renewal = expiry.ExpiryRenewal(client, 6, renewals=600)
    renewal.add(part, 1, None)
    assert begun.wait(PATIENCE)
    closer = threading.Thread(target=renewal.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    released.set()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    used = client.pipeline.call_count
    renewal._renew(part)
    assert client.pipeline.call_count == used
