"""Payloads on the server of the weights, whose keys expire with their leases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from trinity_schemas import PayloadAddress, payload_key

from ...errors import DeadlineExceeded
from ...log.redis.error_replies import reply_text
from ...log.retry import is_transient, retry_for
from .base import ANSWER_LEASE

_READ_AT_ONCE = 8 << 20
"""Bytes of payloads in one round trip: enough to hide it, and little beside those of a step."""
_KEYS_AT_ONCE = 1000
"""Keys of one pipeline: its replies are in memory together."""


class RedisPayloads:
    """Implements :class:`.PayloadStore` with one key a payload.

    Args:
        client: Client of the server of the weights.
        run_id: The run.
    """

    transport: Literal["redis", "shm"] = "redis"

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    async def write(self, payloads: Mapping[str, bytes]) -> None:
        """Write payloads under their names, each with a lease of :data:`.ANSWER_LEASE`."""
        pipe = self._client.pipeline(transaction=False)
        for name, payload in payloads.items():
            pipe.set(payload_key(self._run_id, name), payload, px=int(ANSWER_LEASE * 1000))
        await pipe.execute()

    async def renew(self, names: Sequence[str], seconds: float) -> set[str]:
        """Give payloads a lease of some seconds from now on; return the names of those there."""
        there: set[str] = set()
        for batch in _batches(names):
            pipe = self._client.pipeline(transaction=False)
            for name in batch:
                pipe.pexpire(payload_key(self._run_id, name), int(seconds * 1000))
            replies = await pipe.execute()
            there.update(name for name, reply in zip(batch, replies, strict=True) if reply)
        return there

    async def free(self, names: Iterable[str]) -> None:
        """Delete payloads; names that are unknown change nothing."""
        for batch in _batches([*names]):
            pipe = self._client.pipeline(transaction=False)
            for name in batch:
                # UNLINK frees the memory in a thread of the server, which DEL would block.
                pipe.unlink(payload_key(self._run_id, name))
            await pipe.execute()


class RedisPayloadReader:
    """Implements :class:`.PayloadReader`.

    Args:
        client: Synchronous client of the server of the weights.
        run_id: The run.
        deadline: Seconds for which a server that is away is waited for.
    """

    transport: Literal["redis", "shm"] = "redis"

    def __init__(self, client: Any, run_id: str, *, deadline: float) -> None:
        self._client = client
        self._run_id = run_id
        self._deadline = deadline

    def read(self, addresses: Sequence[PayloadAddress]) -> Iterator[bytes | None]:
        """Yield the bytes of payloads in order, unchecked; None for one that is not there."""
        begin = 0
        while begin < len(addresses):
            end, size = begin + 1, addresses[begin].size
            while end < len(addresses) and size + addresses[end].size <= _READ_AT_ONCE:
                size += addresses[end].size
                end += 1
            for payload in self._read(addresses[begin:end]):
                yield payload or None
            begin = end

    def _read(self, addresses: Sequence[PayloadAddress]) -> list[bytes]:
        def request() -> list[bytes]:
            pipe = self._client.pipeline(transaction=False)
            for address in addresses:
                # A range, as a writer may have put more bytes there than its reference says.
                pipe.getrange(payload_key(self._run_id, address.name), 0, address.size - 1)
            replies: list[bytes] = pipe.execute()
            return replies

        try:
            return retry_for(self._deadline, request)
        except Exception as error:
            if not is_transient(error):
                raise
            raise DeadlineExceeded(
                f"run {self._run_id}: {len(addresses)} payloads of answers were not read",
                self._deadline,
                reply_text(error),
            ) from error


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(names), _KEYS_AT_ONCE):
        yield names[begin : begin + _KEYS_AT_ONCE]
