"""States of a run at some of its entries, in bounded memory."""

from __future__ import annotations

from bisect import bisect_right

from msgspec import Struct

from ..core import MonitorState
from ..core.kept_states import compress_state, inflate_state

_WIDEST = 4000
"""Entries between two kept states up to which states are dropped for their number alone.

A fold of so many entries takes some 30 ms.
"""


class StateLimits(Struct, frozen=True, kw_only=True):
    """Limits of the kept states.

    Attributes:
        spacing: Entries between two kept states of a short log.
        most: Maximum kept states; beyond it every second one is dropped.
        most_bytes: Maximum bytes of the kept states; beyond it every second one is dropped.
    """

    spacing: int = 500
    most: int = 1024
    most_bytes: int = 64 << 20


class CompressedState(Struct, frozen=True):
    """Compressed state after ``number`` entries."""

    number: int
    position: str
    snapshot: bytes

    def decode(self) -> MonitorState:
        """Return the state, which the caller may fold on."""
        return inflate_state(self.snapshot)


class CompressedStates:
    """Kept states in the order of the log; a longer log keeps them further apart."""

    def __init__(self, limits: StateLimits = StateLimits()) -> None:
        self.spacing = limits.spacing
        self._limits = limits
        self._states: list[CompressedState] = []
        self._numbers: list[int] = []
        self._bytes = 0

    @property
    def count(self) -> int:
        """Number of kept states."""
        return len(self._states)

    @property
    def nbytes(self) -> int:
        """Bytes of the kept states."""
        return self._bytes

    def is_due(self, number: int) -> bool:
        """Return True if the state after this number of entries is to be kept."""
        return number % self.spacing == 0

    def add(self, number: int, state: MonitorState) -> None:
        """Keep a state; drop every second one if there are too many."""
        entry = CompressedState(number, state.position, compress_state(state))
        self._states.append(entry)
        self._numbers.append(number)
        self._bytes += len(entry.snapshot)
        most = self._limits.most
        crowded = len(self._states) > most and self.spacing < _WIDEST
        if crowded or self._bytes > self._limits.most_bytes or len(self._states) > 4 * most:
            self._thin_out()

    def before(self, number: int) -> CompressedState | None:
        """Return the last kept state after at most ``number`` entries; None if there is none."""
        at = bisect_right(self._numbers, number)
        return self._states[at - 1] if at else None

    def _thin_out(self) -> None:
        self.spacing *= 2
        first = self._numbers[0]
        self._states = [
            entry
            for entry in self._states
            # The first one stays: every question needs a state before it.
            if entry.number == first or entry.number % self.spacing == 0
        ]
        self._numbers = [entry.number for entry in self._states]
        self._bytes = sum(len(entry.snapshot) for entry in self._states)
