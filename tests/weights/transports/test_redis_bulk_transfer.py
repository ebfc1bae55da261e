"""Weights over Redis: large values by a connection of their own, or the client's way."""

import socket
from unittest import mock

import pytest
import redis
import torch

from tests.support.errors import raises
from tests.support.published_parts import announcement, assert_same, put, read
from tests.support.transport_processes import SOME, Where
from trinity_events.server import open_client
from trinity_events.weights import PartWriter
from trinity_events.weights.transports.redis.bulk import BulkConnection, BulkError
from trinity_events.weights.transports.redis.values import ValueChanged
from trinity_schemas import chunk_key, decode_manifest

pytestmark = pytest.mark.server


@pytest.fixture
def stores(weights_url):
    """The publisher's end and the reader's."""
    made = [Where("redis", weights_url).store() for _ in range(2)]
    yield made
    for store in made:
        store.close()


def test_large_values_go_by_their_own_connection_and_the_clients_way_when_it_breaks(stores, part):
    ours, theirs = stores
    event = put(ours, part)
    assert_same(read(theirs, part.run_id, event), SOME)
    used = [store._values._made for store in (ours, theirs)]
    assert all(used)
    cut(ours)
    cut(theirs)
    event = put(ours, part._replace(step=2))
    assert_same(read(theirs, part.run_id, event), SOME)
    put(ours, part._replace(step=3))
    assert ours._values._made not in {None, used[0]}, "there is another by now"


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


LARGE = [("first", torch.rand(1 << 18)), ("odd", torch.rand(600_001)), ("small", torch.ones(3))]


def cut(store):
    """Break the connection that a store has for large values."""
    store._values._made._socket.shutdown(socket.SHUT_RDWR)


def test_large_tensors_go_from_where_they_lie_in_chunks_of_their_own(stores, part):
    ours, theirs = stores
    event = put(ours, part, LARGE, None)
    chunks = decode_manifest(theirs.open(part).manifest).chunks
    # What aligns a tensor is with what is too small for chunks of its own.
    assert [chunk.nbytes for chunk in chunks] == [1 << 20, 2 << 20, 2_400_004 - (2 << 20), 72]
    with mock.patch("trinity_events.weights.reading.pull.digest") as again:
        assert_same(read(theirs, part.run_id, event), LARGE)
    assert not again.called, "all was digested as it came"


@pytest.mark.parametrize("size", [1000, 1 << 18], ids=["copied", "from where it lies"])
def test_what_was_on_its_way_when_a_connection_broke_is_sent_again(stores, part, size):
    ours, theirs = stores
    sent = [("a", torch.rand(size)), ("b", torch.rand(size)), ("c", torch.rand(size))]
    writer = PartWriter(ours, part, 4 * size)
    for name, tensor in sent:
        writer.add(name, tensor)
        if name != "b":  # by then there is no connection of its own
            cut(ours)
    event = announcement(part, writer.seal())
    assert_same(read(theirs, part.run_id, event), sent)


def test_what_has_changed_before_it_could_be_sent_again_is_not_published(stores, part):
    ours, theirs = stores
    writer, tensor = PartWriter(ours, part), torch.zeros(1 << 18)
    writer.add("a", tensor)
    tensor += 1
    # Not by cutting the connection: the answer may be here by then.
    with (
        mock.patch.object(
            BulkConnection, "finish_set", side_effect=BulkError("connection", "broken")
        ),
        raises(ValueChanged, key=chunk_key(*part, 0)),
    ):
        writer.seal()
    writer.discard()
    assert theirs.open(part) is None


@pytest.mark.parametrize(
    "client", [redis.Redis(ssl=True), mock.Mock(spec=["get"])], ids=["TLS", "a cluster"]
)
def test_where_it_cannot_be_one_plain_socket_the_client_does_it(client):
    assert BulkConnection.connect(client) is None
