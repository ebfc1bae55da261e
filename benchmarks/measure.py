"""Statistics over alternating rounds, and the machine's own variation."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from msgspec import Struct, field

T = TypeVar("T")

_PULSE_WORK = 300_000


class Rounds(Struct, frozen=True):
    """Bound of a ratio."""

    bound: Literal["at least", "at most"]
    limit: float

    def met_by(self, ratio: float) -> bool:
        """Return True if a ratio is within the bound."""
        return ratio >= self.limit if self.bound == "at least" else ratio <= self.limit


class Row(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One figure and the figure of its peer.

    ``ratio`` is the figure over the peer's; over rounds, it is the median of the rounds' ratios.
    ``spread`` is the range of the rounds as a share of their median.
    """

    what: str
    figure: str
    peer: str = ""
    peer_figure: str = ""
    ratio: float | None = None
    target: Rounds | None = field(default=None, name="asked")
    spread: float | None = None


class Findings(NamedTuple):
    """Rows and notes of a benchmark."""

    rows: list[Row]
    notes: list[str]


class Noise:
    """Steadiness of the machine: the same small piece of work, timed repeatedly."""

    def __init__(self) -> None:
        self.pulses: list[float] = []

    def beat(self) -> None:
        """Time the work once."""
        began = time.perf_counter()
        sum(range(_PULSE_WORK))
        self.pulses.append(time.perf_counter() - began)

    @property
    def spread(self) -> float:
        """Return the slowest time over the fastest, minus one."""
        return max(self.pulses) / min(self.pulses) - 1 if self.pulses else 0.0


def taking_turns(
    contenders: Mapping[str, Callable[[], T]], rounds: int, noise: Noise
) -> dict[str, list[T]]:
    """Measure each contender once per round, in rotating order.

    A disturbance of the machine affects all contenders, and each one has every place in the order.
    """
    results: dict[str, list[T]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            noise.beat()
            say(f"  round {number + 1} of {rounds}: {name}")
            results[name].append(contenders[name]())
    return results


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> float | None:
    """Return the range over the median; None for a single value."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None


def ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    """Return the median of the rounds' ratios: both figures of a round saw the same machine."""
    return median([figure / peer_figure for figure, peer_figure in zip(ours, peer, strict=True)])


def say_row(row: Row) -> None:
    """Print a row as it is measured: a benchmark of many minutes may be interrupted."""
    peer = f", {row.peer} {row.peer_figure}" if row.peer else ""
    say(f"  {row.what}: {row.figure}{peer}")


def say(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)
