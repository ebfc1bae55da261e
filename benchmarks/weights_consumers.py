"""Several consumers of one version: all in time, one late, one slow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from .measure import Noise, Row, median, ratio, say, spread, taking_turns
from .weights_contenders import Contenders, Timed
from .weights_peer import Model, Peer, peer

SLOW = 0.5
"""Seconds for which the slow consumer holds the previous version."""


def consumer_rows(name: str, model: Model, most: int, url: str, rounds: int) -> list[Row]:
    """Return rows of the time from the first byte published to the last byte applied."""
    counts = [number for number in (1, 2, 4, 8) if number <= most]
    with ExitStack() as exits:
        peers = [exits.enter_context(peer(model, url, None)) for _ in range(most)]
        timings = _measured(model, peers, counts, url, rounds)
    alone = [timed.all for timed in timings["1"]]
    rows = []
    for key, what in [
        *((str(number), f"{number} consumers") for number in counts[1:]),
        ("late", f"{most} consumers, one of them late (it begins when it is announced)"),
        ("slow", f"all but one of {most} consumers, while that one holds the version before"),
    ]:
        theirs = [timed.all for timed in timings[key]]
        rows.append(
            Row(
                what=f"{name}, {what}",
                figure=f"{median(theirs) * 1000:,.1f} ms",
                peer="one consumer",
                peer_figure=f"{median(alone) * 1000:,.1f} ms",
                ratio=ratio(alone, theirs),
                spread=spread(theirs),
            )
        )
    return rows


def _measured(
    model: Model, peers: list[Peer], counts: list[int], url: str, rounds: int
) -> dict[str, list[Timed]]:
    ours = Contenders(model, peers, url)

    def among(number: int, late: int = 0) -> Timed:
        ours.others = peers[:number]
        return ours.through("shm", along=True, late=late)

    def beside_a_slow_one() -> Timed:
        peers[-1].say("hold", ours.newest, SLOW)
        timed = among(len(peers) - 1)
        peers[-1].wait()
        return timed

    them: dict[str, Callable[[], Timed]] = {
        str(number): partial(among, number) for number in counts
    }
    them["late"] = partial(among, len(peers), late=1)
    them["slow"] = beside_a_slow_one
    try:
        for contender in them.values():
            contender()
        say(f"  {len(peers)} consumers")
        return taking_turns(them, rounds, Noise())
    finally:
        ours.close()
