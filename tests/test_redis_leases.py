"""Leases over Redis: who reads a superseded part gets all of it, and nobody else waits for ever."""

from unittest import mock

import pytest
import redis

from tests.test_transports import put
from tests.transport_actors import CHUNK, Where
from trinity_events.server import open_client
from trinity_events.weights import PartRef
from trinity_events.weights.transports.redis.leases import LONGEST
from trinity_schemas import chunk_key, leases_key

SIZES = [CHUNK] * 5 + [24_160 - 5 * CHUNK]
"""Of six tensors of 4,000 bytes, aligned."""


@pytest.fixture
def part(run_id):
    return PartRef(run_id, 1, 1, 0)


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


def there(source) -> list[bool]:
    """Of each chunk, whether it is."""
    found = []
    source.read(SIZES, lambda index, data, digested=None: found.append(data is not None))
    return found


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
