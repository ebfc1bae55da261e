"""The other ends of the benchmarks of transports: processes, and the rows that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

from .measure import Asked, Row, median, ratio, spread
from .weights_peer import Model, Peer

# One process that has torch, forked for each end: it has no threads and nothing open.
_processes = get_context("forkserver")
_processes.set_forkserver_preload(["benchmarks.weights_transports"])


class Turn(NamedTuple):
    """A model, and over how many rounds it is measured."""

    name: str
    model: Model
    rounds: int


@contextmanager
def end(serve: Callable[..., None], *arguments: Any) -> Iterator[Peer]:
    """A process that answers what it is asked through its first argument."""
    ours, theirs = _processes.Pipe()
    started = _processes.Process(target=serve, args=(theirs, *arguments), daemon=True)
    started.start()
    theirs.close()
    try:
        yield Peer(ours)
    finally:
        ours.close()
        started.join(10)
        started.kill()
        started.join()


def row(
    turn: Turn,
    what: str,
    peer: str,
    ours: list[float],
    theirs: list[float],
    asked: Asked | None = None,
) -> Row:
    """The seconds of ours beside those of a peer, by speed."""
    return Row(
        what=f"{turn.name}, {what}",
        figure=_figure(turn.model, ours),
        peer=peer,
        peer_figure=_figure(turn.model, theirs),
        ratio=ratio(theirs, ours),
        asked=asked,
        spread=spread(ours),
    )


def _figure(model: Model, seconds: list[float]) -> str:
    middle = median(seconds)
    return f"{middle * 1000:,.1f} ms, {model.nbytes / middle / (1 << 30):.2f} GiB/s"
