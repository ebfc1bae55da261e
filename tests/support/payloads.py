"""Payloads in the memory of a test, whose leases end by its clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from trinity_events.rollouts.payloads import ANSWER_LEASE
from trinity_schemas import PayloadAddress


class MemoryPayloads:
    """Payload store and reader.

    Args:
        now: Returns seconds of a clock that is never set.
    """

    transport = "redis"

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._payloads: dict[str, tuple[bytes, float]] = {}
        self.lost: set[str] = set()
        """Names of payloads that no process has deleted: they vanished, or their lease ended."""

    def vanish(self) -> None:
        """Lose all payloads, as a server without a file may."""
        self.lost |= self._payloads.keys()
        self._payloads = {}

    @property
    def names(self) -> set[str]:
        """Names of the payloads that are there."""
        ended = {name for name, (_, end) in self._payloads.items() if end <= self._now()}
        self.lost |= ended
        self._payloads = {
            name: entry for name, entry in self._payloads.items() if name not in ended
        }
        return {*self._payloads}

    async def write(self, payloads: Mapping[str, bytes]) -> None:
        """Write payloads."""
        for name, payload in payloads.items():
            self._payloads[name] = payload, self._now() + ANSWER_LEASE

    async def renew(self, names: Sequence[str], seconds: float) -> set[str]:
        """Renew leases; return the names of those there."""
        there = self.names.intersection(names)
        for name in there:
            self._payloads[name] = self._payloads[name][0], self._now() + seconds
        return there

    async def free(self, names: Iterable[str]) -> None:
        """Delete payloads."""
        for name in names:
            self._payloads.pop(name, None)

    def read(self, addresses: Sequence[PayloadAddress]) -> Iterator[bytes | None]:
        """Yield the bytes of payloads."""
        for address in addresses:
            yield self._payloads[address.name][0] if address.name in self.names else None
