"""Outbox of a publisher: a bounded queue of unconfirmed events, in order."""

from __future__ import annotations

from collections import deque

_AT_ONCE = 512
_BYTES_AT_ONCE = 1 << 20


class Outbox:
    """Payloads that no server confirmed yet, oldest first.

    A sent payload stays until the server confirms it. It is used by one thread at a time.

    Args:
        capacity: Payloads that it holds at most.
        capacity_bytes: Bytes of those events at most.
    """

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self.accepted = 0
        """Number of payloads that were ever put in."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def confirmed(self) -> int:
        """Number of payloads that a server confirmed."""
        return self.accepted - len(self._waiting)

    def put(self, payload: bytes) -> bool:
        """Append a payload; return False if there is no room for it."""
        full = self._bytes + len(payload) > self._capacity_bytes
        if full or len(self._waiting) >= self._capacity:
            return False
        self._waiting.append(payload)
        self._bytes += len(payload)
        self.accepted += 1
        return True

    def batch(self) -> list[bytes]:
        """Return the oldest payloads to send at once; at least one unless the outbox is empty."""
        batch: list[bytes] = []
        size = 0
        for payload in self._waiting:
            size += len(payload)
            if batch and (size > _BYTES_AT_ONCE or len(batch) == _AT_ONCE):
                break
            batch.append(payload)
        return batch

    def drop(self, count: int) -> None:
        """Remove the oldest payloads, which the server confirmed."""
        for _ in range(count):
            self._bytes -= len(self._waiting.popleft())
