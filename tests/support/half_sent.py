"""Connections that send half a request to a server process, and never the rest."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

HALF_HEAD = b"GET /api/runs HTTP/1.1\r\nhost: 127.0.0.1\r\nx-more: "
HALF_BODY = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9000\r\n\r\nhalf"


@contextmanager
def half_sent(port: int, count: int, sent: bytes = HALF_HEAD) -> Iterator[list[socket.socket]]:
    """Hold connections that sent bytes and wait, all from one address."""
    with ExitStack() as exits:
        peers = []
        for _ in range(count):
            peer = exits.enter_context(socket.create_connection(("127.0.0.1", port)))
            peer.sendall(sent)
            peers.append(peer)
        yield peers


def wait_for_closed(peers: list[socket.socket], count: int, seconds: float) -> int:
    """Wait until the server has closed that many connections; return the number it has."""
    until = time.monotonic() + seconds
    poll = select.poll()
    for peer in peers:
        poll.register(peer, select.POLLIN)  # a closed one can be read, to its end
    while (closed := len(poll.poll(0))) < count and time.monotonic() < until:
        time.sleep(0.01)
    return closed
