"""Receiving processes and shared rows of the transport benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple, Protocol

from .measure import Rounds, Row, median, ratio, spread
from .weights_peer import Model, Peer, process_of

# A process with torch is forked for each end: it has no threads and no open files.
_processes = get_context("forkserver")
_processes.set_forkserver_preload(["benchmarks.weights_transports"])


class OfModel(Protocol):
    """Properties of a turn that rows use."""

    @property
    def name(self) -> str:
        """Name of the turn in its rows."""
        ...

    @property
    def model(self) -> Model:
        """Model that is transferred."""
        ...


class Turn(NamedTuple):
    """Model, and the number of its rounds."""

    name: str
    model: Model
    rounds: int


@contextmanager
def end(serve: Callable[..., None], *arguments: Any) -> Iterator[Peer]:
    """Start a process that answers requests from its first argument."""
    with process_of(_processes, serve, *arguments) as started:
        yield started


def row(
    turn: OfModel,
    what: str,
    ours: list[float],
    peer: str,
    theirs: list[float],
    target: Rounds | None = None,
) -> Row:
    """Return a row that compares our seconds with a peer's, as speeds."""
    return Row(
        what=f"{turn.name}, {what}",
        figure=figure(turn.model, ours),
        peer=peer,
        peer_figure=figure(turn.model, theirs),
        ratio=ratio(theirs, ours),
        target=target,
        spread=spread(ours),
    )


def figure(model: Model, seconds: list[float]) -> str:
    """Format the time of a version and its bandwidth."""
    middle = median(seconds)
    return f"{middle * 1000:,.1f} ms, {model.nbytes / middle / (1 << 30):.2f} GiB/s"
