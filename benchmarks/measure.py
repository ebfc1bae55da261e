"""Figures: medians over rounds that take turns, and how far the machine itself swings."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from msgspec import Struct

T = TypeVar("T")

_PULSE_WORK = 300_000


class Rounds(Struct, frozen=True):
    """What a ratio is asked to be."""

    bound: Literal["at least", "at most"]
    limit: float

    def met_by(self, ratio: float) -> bool:
        """Whether a ratio is within it."""
        return ratio >= self.limit if self.bound == "at least" else ratio <= self.limit


class Row(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One figure, beside what it is held against.

    ``ratio`` is the figure over the peer's; over rounds, the median of the rounds' ratios.
    ``spread`` is how far the rounds lie apart, as a share of their median.
    """

    what: str
    figure: str
    peer: str = ""
    peer_figure: str = ""
    ratio: float | None = None
    asked: Rounds | None = None
    spread: float | None = None


class Findings(NamedTuple):
    """What a benchmark found, and what its reader should know."""

    rows: list[Row]
    notes: list[str]


class Noise:
    """How steady the machine is: the same small piece of work, timed again and again."""

    def __init__(self) -> None:
        self.pulses: list[float] = []

    def beat(self) -> None:
        """Time the work once."""
        began = time.perf_counter()
        sum(range(_PULSE_WORK))
        self.pulses.append(time.perf_counter() - began)

    @property
    def spread(self) -> float:
        """The slowest over the fastest, less one."""
        return max(self.pulses) / min(self.pulses) - 1 if self.pulses else 0.0


def taking_turns(
    contenders: Mapping[str, Callable[[], T]], rounds: int, noise: Noise
) -> dict[str, list[T]]:
    """Measure each contender once a round, a different one first each time.

    What disturbs the machine for a while disturbs them all, and nobody is always the warm one.
    """
    found: dict[str, list[T]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            noise.beat()
            say(f"  round {number + 1} of {rounds}: {name}")
            found[name].append(contenders[name]())
    return found


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> float | None:
    """The largest less the smallest, as a share of the median; None of a single one."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None


def ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    """The median of the rounds' ratios: two figures of one round saw the same machine."""
    return median([one / other for one, other in zip(ours, peer, strict=True)])


def say(line: str) -> None:
    """Progress, for people."""
    print(line, file=sys.stderr, flush=True)
