"""Weights over Redis: large values by a connection of their own, or the client's way."""

import socket
from unittest import mock

import pytest
import redis

from tests.test_transports import assert_same, put, read
from tests.transport_actors import SOME, Where
from trinity_events.server import open_client
from trinity_events.weights import PartRef
from trinity_events.weights.redis_bulk import BulkConnection


@pytest.fixture
def part(run_id):
    return PartRef(run_id, 1, 1, 0)


@pytest.fixture
def stores(weights_url):
    """The publisher's end and the reader's."""
    made = [Where("redis", weights_url).store() for _ in range(2)]
    yield made
    for one in made:
        one.close()


def test_large_values_go_by_their_own_connection_and_the_clients_way_when_it_breaks(stores, part):
    ours, theirs = stores
    event = put(ours, part)
    assert_same(read(theirs, part.run_id, event), SOME)
    used = [one._bulk._made for one in (ours, theirs)]
    assert all(used)
    for one in used:
        one._socket.shutdown(socket.SHUT_RDWR)
    event = put(ours, part._replace(step=2))
    assert_same(read(theirs, part.run_id, event), SOME)
    put(ours, part._replace(step=3))
    assert ours._bulk._made not in {None, used[0]}, "there is another by now"


def test_a_server_that_refuses_a_value_is_told_by_the_clients_own_error(stores, weights_url, part):
    ours, _ = stores
    with open_client(weights_url) as client:
        before = client.config_get("maxmemory")["maxmemory"]
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(redis.OutOfMemoryError):
                put(ours, part)
        finally:
            client.config_set("maxmemory", before)


@pytest.mark.parametrize(
    "client", [redis.Redis(ssl=True), mock.Mock(spec=["get"])], ids=["TLS", "a cluster"]
)
def test_where_it_cannot_be_one_plain_socket_the_client_does_it(client):
    assert BulkConnection.of(client) is None
