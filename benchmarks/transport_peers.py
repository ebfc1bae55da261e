"""The other ends of the benchmarks of transports: processes, and the rows that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple, Protocol

from .measure import Rounds, Row, median, ratio, spread
from .weights_peer import Model, Peer, process_of

# One process that has torch, forked for each end: it has no threads and nothing open.
_processes = get_context("forkserver")
_processes.set_forkserver_preload(["benchmarks.weights_transports"])


class OfModel(Protocol):
    """What rows need to know of a turn."""

    @property
    def name(self) -> str:
        """As the rows name it."""
        ...

    @property
    def model(self) -> Model:
        """What travels."""
        ...


class Turn(NamedTuple):
    """A model, and over how many rounds it is measured."""

    name: str
    model: Model
    rounds: int


@contextmanager
def end(serve: Callable[..., None], *arguments: Any) -> Iterator[Peer]:
    """A process that answers what it is asked through its first argument."""
    with process_of(_processes, serve, *arguments) as started:
        yield started


def row(
    turn: OfModel,
    what: str,
    ours: list[float],
    peer: str,
    theirs: list[float],
    asked: Rounds | None = None,
) -> Row:
    """The seconds of ours beside those of a peer, by speed."""
    return Row(
        what=f"{turn.name}, {what}",
        figure=figure(turn.model, ours),
        peer=peer,
        peer_figure=figure(turn.model, theirs),
        ratio=ratio(theirs, ours),
        asked=asked,
        spread=spread(ours),
    )


def figure(model: Model, seconds: list[float]) -> str:
    """How long a version takes, and how fast its bytes travel so."""
    middle = median(seconds)
    return f"{middle * 1000:,.1f} ms, {model.nbytes / middle / (1 << 30):.2f} GiB/s"
