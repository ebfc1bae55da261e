"""What a publisher has yet to send: a bounded queue in order, of which nothing is lost."""

from __future__ import annotations

from collections import deque

_AT_ONCE = 512
_BYTES_AT_ONCE = 1 << 20


class Outbox:
    """Payloads that no server took yet, oldest first.

    What is sent stays until it is known to be taken. For one thread at a time.

    Args:
        capacity: Payloads that it holds at most.
        capacity_bytes: Their bytes at most.
    """

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self.accepted = 0
        """How many were ever put in."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """How many a server took."""
        return self.accepted - len(self._waiting)

    def put(self, payload: bytes) -> bool:
        """Put one in at the end. False when there is no room, and then it is not in."""
        full = self._bytes + len(payload) > self._capacity_bytes
        if full or len(self._waiting) >= self._capacity:
            return False
        self._waiting.append(payload)
        self._bytes += len(payload)
        self.accepted += 1
        return True

    def batch(self) -> list[bytes]:
        """The oldest, as many as are sent at once; one at least, unless it is empty."""
        found: list[bytes] = []
        size = 0
        for payload in self._waiting:
            size += len(payload)
            if found and (size > _BYTES_AT_ONCE or len(found) == _AT_ONCE):
                break
            found.append(payload)
        return found

    def drop(self, count: int) -> None:
        """Forget the oldest: they were taken."""
        for _ in range(count):
            self._bytes -= len(self._waiting.popleft())
