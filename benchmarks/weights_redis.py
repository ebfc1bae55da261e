"""Weights over Redis, compared with a plain socket that sets and gets the same bytes unchecked."""

from __future__ import annotations

import socket
import time
from collections import deque
from itertools import count
from typing import NamedTuple

import torch

from trinity_events.server import EmbeddedServer, open_client
from trinity_events.weights import PartRef, RedisChunkStore, pull_version
from trinity_events.weights.publishing.part_writer import LastLayout
from trinity_schemas import StepReady

from .environment import Stage
from .measure import Findings, Noise, Rounds, Row, median, ratio, spread, taking_turns
from .report import PERFORMANCE
from .weights_peer import KEPT, published

TITLE = "weights over Redis, from publish to pulled and verified"
PLACE = PERFORMANCE
LIMIT = Rounds("at least", 0.7)
OURS, BARE = "publish and pull, digests on", "bare socket: SET, then GET"
_VALUE = 4 << 20
_RUN = "bench-weights-redis"


class Turn(NamedTuple):
    """Model of float32 tensors of equal size, and the number of its rounds."""

    name: str
    tensors: int
    elements: int
    rounds: int


class Size(NamedTuple):
    """Models, and the expected duration."""

    turns: tuple[Turn, ...]
    takes: str


SMALL = Turn("64 MiB in 200 tensors", 200, 83_886, 10)
SIZES = {
    "tiny": Size((Turn("2 MiB in 2 tensors", 2, 1 << 18, 2),), "5 s"),
    "small": Size((SMALL, Turn("64 MiB in 1,000 tensors", 1000, 16_777, 10)), "15 s"),
    "full": Size(
        (
            SMALL._replace(rounds=15),
            Turn("64 MiB in 1,000 tensors", 1000, 16_777, 15),
            Turn("512 MiB in 200 tensors", 200, 671_088, 10),
        ),
        "1 min",
    ),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Send the same bytes both ways, by turns."""
    rows = [measured(on, turn, noise) for turn in size.turns]
    notes = [
        "One process does both ends, one after the other; the bare socket digests nothing.",
        f"As in a run, {KEPT} versions are kept. The bare socket sets the same few keys again.",
    ]
    return Findings(rows, notes)


def measured(on: Stage, turn: Turn, noise: Noise) -> Row:
    """Measure one model."""
    tensors = {f"t{index}": torch.randn(turn.elements) for index in range(turn.tensors)}
    data = torch.cat(list(tensors.values())).view(torch.uint8).numpy().data
    steps, parts = count(1), deque[PartRef]()
    with (
        EmbeddedServer(on.folder, "weights", durable=False).attached() as url,
        open_client(url) as publishing_client,
        open_client(url) as reading_client,
    ):
        publisher, reader = RedisChunkStore(publishing_client), RedisChunkStore(reading_client)
        layout = LastLayout()

        def ours() -> float:
            began = time.perf_counter()
            part = PartRef(_RUN, 1, next(steps), 0)
            pulled(reader, part, published(publisher, part, tensors, layout))
            seconds = time.perf_counter() - began
            parts.append(part)
            while len(parts) > KEPT:
                publisher.delete(parts.popleft())
            return len(data) / seconds

        into = bytearray(len(data))

        def bare() -> float:
            began = time.perf_counter()
            set_and_get(bare_socket, data, memoryview(into))
            return len(data) / (time.perf_counter() - began)

        with socket.socket(socket.AF_UNIX) as bare_socket:
            bare_socket.connect(url.removeprefix("unix://"))
            # The first rounds map memory, also in the server.
            taking_turns({OURS: ours, BARE: bare}, KEPT + 2, noise)
            rates = taking_turns({OURS: ours, BARE: bare}, turn.rounds, noise)
        publisher.close()
        reader.close()
    return Row(
        what=f"{turn.name}, {OURS}",
        figure=_rate(rates[OURS]),
        peer=BARE,
        peer_figure=_rate(rates[BARE]),
        ratio=ratio(rates[OURS], rates[BARE]),
        spread=spread(rates[OURS]),
        target=LIMIT,
    )


def pulled(store: RedisChunkStore, part: PartRef, ready: StepReady) -> None:
    """Pull a part and verify it."""
    with pull_version(store, part.run_id, ready) as version:
        assert version.bytes


def set_and_get(to: socket.socket, data: memoryview, into: memoryview) -> None:
    """Send the data in values of 4 MiB, and receive them."""
    for begin in range(0, len(data), _VALUE):
        value, key = data[begin : begin + _VALUE], b"bare-%d" % begin
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value))
        to.sendall(head)
        to.sendall(value)
        to.sendall(b"\r\n")
        _expect(to, b"+OK\r\n")
    for begin in range(0, len(data), _VALUE):
        value, key = into[begin : begin + _VALUE], b"bare-%d" % begin
        to.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        _expect(to, b"$%d\r\n" % len(value))
        _fill(to, value)
        _expect(to, b"\r\n")


def _expect(to: socket.socket, words: bytes) -> None:
    reply = bytearray(len(words))
    _fill(to, memoryview(reply))
    assert reply == words


def _fill(to: socket.socket, into: memoryview) -> None:
    filled = 0
    while filled < len(into):
        filled += to.recv_into(into[filled:])


def _rate(rates: list[float]) -> str:
    return f"{median(rates) / 2**30:.2f} GiB/s"
