"""Connections are bounded, whatever their peers send or leave unsent."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from tests.support.waits import PATIENCE

pytest.importorskip("uvicorn")

from trinity_events.http_server import connections
from trinity_events.http_server.connections import ConnectionLimits, ServerBusy, get_connection
from trinity_events.http_server.serving import (
    AddressUnusable,
    open_listening_socket,
    serve_application,
)

DEADLINE = 0.2
"""Seconds of a deadline under test."""
HEAD = b"GET /%s HTTP/1.1\r\nhost: here\r\n\r\n"
HALF_HEAD = b"GET / HTTP/1.1\r\nhost: he"


class Face:
    """Application with a public page, data that is admitted, and streams."""

    def __init__(self):
        self.holding = asyncio.Semaphore(0)
        """Released once for each answer that is held."""
        self.answered = asyncio.Event()
        """Set once ``/long`` or ``/left`` was answered."""
        self.released = asyncio.Event()
        """Set to end the answers of ``/held``, and streams."""

    async def __call__(self, scope, receive, send):
        path = scope["path"]
        if path == "/":
            await answer(send, 200, b"page")
        elif path == "/left":
            self.holding.release()
            while (await receive())["type"] != "http.disconnect":
                pass
            with get_connection(scope).admitted():
                get_connection(scope).become_stream()
            self.answered.set()
        elif path == "/long":
            await answer(send, 200, bytes(32 << 20))
            self.answered.set()
        else:
            try:
                with get_connection(scope).admitted():
                    await self._answer_data(path, scope, send)
            except ServerBusy as error:
                await answer(send, 503, str(error).encode())

    async def _answer_data(self, path, scope, send):
        if path == "/held":
            self.holding.release()
            await self.released.wait()
        elif path == "/stream":
            get_connection(scope).become_stream()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun\n", "more_body": True})
            await self.released.wait()
            await send({"type": "http.response.body", "body": b""})
            return
        await answer(send, 200, b"data")


async def answer(send, status, body):
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Peer:
    """Peer of the server."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    def send(self, data):
        """Send bytes, without waiting for any."""
        self._writer.write(data)

    async def status(self):
        """Read an answer whose body has four bytes or is a sentence; return its status."""
        with anyio.fail_after(PATIENCE):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await self._reader.readexactly(length)
        return int(head.split()[1])

    async def until_begun(self):
        """Wait until a stream has begun."""
        with anyio.fail_after(PATIENCE):
            await self._reader.readuntil(b"begun\n")

    async def until_closed(self):
        """Read until the server closes the connection."""
        with anyio.fail_after(PATIENCE):
            try:
                while await self._reader.read(1 << 16):
                    pass
            except ConnectionError:
                pass

    async def is_open(self):
        """Return True if the server has not closed the connection."""
        with anyio.move_on_after(0.05):
            await self.until_closed()
            return False
        return True


class Server:
    """Server of a face in the event loop of the test."""

    def __init__(self, port, face):
        self.port, self.face = port, face

    @asynccontextmanager
    async def peer(self, data=b"", *, address="127.0.0.1", limit=1 << 16):
        """Connect from an address of loopback, and send bytes."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(address, 0), limit=limit
        )
        try:
            writer.write(data)
            yield Peer(reader, writer)
        finally:
            writer.close()

    async def until_holding(self):
        """Wait until one more answer is held."""
        with anyio.fail_after(PATIENCE):
            await self.face.holding.acquire()

    async def status(self, path, **keywords):
        """Return the status of an answer, in a connection of its own."""
        async with self.peer(HEAD % path, **keywords) as peer:
            return await peer.status()


@pytest.fixture
def limits(request):
    """The limits of the server; tests that set some are parametrized with :func:`limited`."""
    return ConnectionLimits(**getattr(request, "param", {}))


def limited(**limits):
    """Limit the server of a test."""
    return pytest.mark.parametrize("limits", [limits], indirect=True, ids=[""])


@pytest.fixture
async def server(limits):
    face = Face()
    started = asyncio.Event()
    with open_listening_socket("the test", "127.0.0.1", 0) as listening:
        task = asyncio.ensure_future(
            serve_application(
                face,
                listening,
                on_start=started.set,
                on_stop=face.released.set,
                limits=limits,
            )
        )
        try:
            with anyio.fail_after(PATIENCE):
                await started.wait()
            yield Server(listening.getsockname()[1], face)
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
async def exits():
    async with AsyncExitStack() as stack:
        yield stack


async def send_bytewise(peer, data):
    """Send a byte every tenth of the deadline, for as long as the test lasts."""
    for byte in data:
        peer.send(bytes([byte]))
        await asyncio.sleep(DEADLINE / 10)


@limited(head_seconds=DEADLINE)
@pytest.mark.parametrize("sent", [b"", b"\r\n", HALF_HEAD], ids=["nothing", "a line", "half"])
async def test_a_head_that_is_not_complete_ends_at_its_deadline(server, sent):
    async with server.peer(sent) as peer:
        await peer.until_closed()


@limited(head_seconds=DEADLINE)
async def test_bytes_one_by_one_do_not_extend_the_deadline_of_a_head(server):
    async with server.peer() as peer, anyio.create_task_group() as tasks:
        tasks.start_soon(send_bytewise, peer, HALF_HEAD + 200 * b"e")
        await peer.until_closed()
        tasks.cancel_scope.cancel()


@limited(head_seconds=DEADLINE)
@pytest.mark.parametrize("pipelined", [True, False], ids=["with the first", "after its answer"])
async def test_the_head_of_a_later_request_has_the_same_deadline(server, pipelined):
    async with server.peer(HEAD % b"held" + (HALF_HEAD if pipelined else b"")) as peer:
        await server.until_holding()
        server.face.released.set()
        assert await peer.status() == 200
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_bytewise, peer, b"ere" if pipelined else HALF_HEAD)
            await peer.until_closed()
            tasks.cancel_scope.cancel()


@limited(idle_seconds=DEADLINE)
async def test_a_connection_without_a_further_request_ends(server):
    async with server.peer(HEAD % b"") as peer:
        assert await peer.status() == 200
        await peer.until_closed()


@limited(head_seconds=0.5)  # the head itself must come in time
async def test_an_answer_has_no_deadline_of_a_head(server):
    async with server.peer(HEAD % b"held") as peer:
        await server.until_holding()
        await asyncio.sleep(0.6)
        server.face.released.set()
        assert await peer.status() == 200


@pytest.mark.parametrize(
    "announced",
    [b"content-length: 100000", b"transfer-encoding: chunked"],
    ids=["length", "chunks"],
)
@pytest.mark.parametrize("sent", [b"", b"5\r\nhello"], ids=["nothing", "half"])
async def test_a_body_is_refused_and_not_waited_for(server, announced, sent):
    head = b"GET /data HTTP/1.1\r\nhost: here\r\n%s\r\n\r\n" % announced
    async with server.peer(head + sent) as peer:
        assert await peer.status() == 413
        await peer.until_closed()


async def test_an_empty_body_is_none(server):
    async with server.peer(b"GET / HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n") as peer:
        assert await peer.status() == 200


@limited(read_seconds=DEADLINE)
async def test_an_answer_that_is_not_read_ends_at_its_deadline(server):
    async with server.peer(HEAD % b"long", limit=1024) as peer:
        with anyio.fail_after(PATIENCE):
            await server.face.answered.wait()
        await asyncio.sleep(2 * DEADLINE)
        read = 0
        with anyio.fail_after(PATIENCE):
            try:
                while data := await peer._reader.read(1 << 20):
                    read += len(data)
            except ConnectionError:
                pass
        assert read < 32 << 20


# --- limits -------------------------------------------------------------------------------------


@limited(waiting_per_address=3)
async def test_beyond_the_limit_of_an_address_its_longest_waiting_connection_ends(server, exits):
    elsewhere = await exits.enter_async_context(server.peer(HALF_HEAD, address="127.0.0.2"))
    peers = [await exits.enter_async_context(server.peer(HALF_HEAD)) for _ in range(5)]
    await peers[0].until_closed()
    await peers[1].until_closed()
    assert all([await peer.is_open() for peer in (*peers[2:], elsewhere)])


@limited(waiting=4)
async def test_beyond_the_limit_of_all_the_address_that_has_most_loses_one(server, exits):
    elsewhere = await exits.enter_async_context(server.peer(HALF_HEAD, address="127.0.0.2"))
    peers = [await exits.enter_async_context(server.peer(HALF_HEAD)) for _ in range(3)]
    last = await exits.enter_async_context(server.peer(HALF_HEAD, address="127.0.0.3"))
    await peers[0].until_closed()
    assert all([await peer.is_open() for peer in (*peers[1:], elsewhere, last)])


@limited(waiting=2, waiting_per_address=2)
async def test_a_request_that_is_admitted_ends_for_none_that_waits(server, exits):
    peers = []
    for _ in range(3):
        peers.append(await exits.enter_async_context(server.peer(HEAD % b"held")))
        await server.until_holding()
    stream = await exits.enter_async_context(server.peer(HEAD % b"stream"))
    await stream.until_begun()
    waiting = [await exits.enter_async_context(server.peer(HALF_HEAD)) for _ in range(4)]
    await waiting[1].until_closed()
    assert await stream.is_open()
    server.face.released.set()
    assert [await peer.status() for peer in peers] == [200] * 3


@limited(requests_per_address=2, requests=3)
async def test_requests_are_limited_by_address_and_in_all_and_then_answered_again(server, exits):
    peers = []
    for address in ("127.0.0.1", "127.0.0.1", "127.0.0.2"):
        if len(peers) == 2:
            assert await server.status(b"data") == 503
            assert await server.status(b"data", address="127.0.0.2") == 200
        peer = await exits.enter_async_context(server.peer(HEAD % b"held", address=address))
        peers.append(peer)
        await server.until_holding()
    assert await server.status(b"data", address="127.0.0.3") == 503
    assert await server.status(b"") == 200
    server.face.released.set()
    assert [await peer.status() for peer in peers] == [200] * 3
    assert await server.status(b"data") == 200


@limited(streams=2)
async def test_a_request_whose_peer_left_before_it_was_admitted_keeps_no_place(server, exits):
    streams = []
    for address in ("127.0.0.1", "127.0.0.3"):
        if streams:
            async with server.peer(HEAD % b"left", address="127.0.0.2"):
                await server.until_holding()
            with anyio.fail_after(PATIENCE):
                await server.face.answered.wait()
        peer = await exits.enter_async_context(server.peer(HEAD % b"stream", address=address))
        await peer.until_begun()
        streams.append(peer)
    assert all([await peer.is_open() for peer in streams])


@limited(streams=3)
async def test_beyond_the_limit_of_streams_the_oldest_of_the_address_that_has_most_ends(
    server, exits
):
    streams = []
    for address in ("127.0.0.2", "127.0.0.1", "127.0.0.1", "127.0.0.3"):
        peer = await exits.enter_async_context(server.peer(HEAD % b"stream", address=address))
        await peer.until_begun()
        streams.append(peer)
    await streams[1].until_closed()
    assert all([await streams[number].is_open() for number in (0, 2, 3)])
    assert await server.status(b"data") == 200


def test_an_address_that_is_none_of_this_machine_is_refused():
    with pytest.raises(AddressUnusable) as refused:
        open_listening_socket("the test", "203.0.113.7", 80)
    assert (refused.value.face, refused.value.host, refused.value.port) == (
        "the test",
        "203.0.113.7",
        80,
    )
    assert refused.value.reason


@pytest.mark.server
@pytest.mark.parametrize(
    ("client", "address"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::9", 1), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1), "fe80::/64"),
        (None, ""),
    ],
)
def test_the_addresses_that_one_host_may_take_count_as_one(client, address):
    assert connections._find_address(client) == address
