"""Ports of payloads: an explorer writes, the dispatcher renews and frees, a rank reads.

1. A payload is written once, whole, under a new random name, before the answer that names it.
2. It has a lease from its first byte on. Without a renewal it is gone at the end of the lease, so
   that a process that dies between payload and answer leaves nothing for good.
3. The dispatcher renews the payloads of answers that may still be trained on. It frees the others,
   after the script that checks its epoch has deleted the entries that name them.
4. A reader allocates no more bytes than the reference says, which the contract bounds.
5. A payload may be lost at any time, as the streams may. It is then generated again.
6. An explorer writes none for a claim that it knows it has lost. It frees none, and ends no lease
   early: a refusal may follow a reply that was lost, and a dispatcher may not renew within a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

from trinity_schemas import PayloadAddress

ANSWER_LEASE = 1800.0
"""Seconds of the lease that an explorer gives a payload, and a dispatcher by default. A trainer's
longest step is shorter, and what crashed explorers leave takes memory for no longer."""
CHECKPOINT_LEASE = 6 * 3600.0
"""Seconds of the lease of an answer that is kept for a resume: a run may stand still for a night's
hours, as its weights may (decision 18)."""


class PayloadStore(Protocol):
    """Store of payloads, as explorers and the dispatcher use it."""

    @property
    def transport(self) -> Literal["redis", "shm"]:
        """Name of its medium."""
        ...

    async def write(self, payloads: Mapping[str, bytes]) -> None:
        """Write payloads under their names, each with a lease of :data:`ANSWER_LEASE`.

        Raises:
            OSError: The medium is full or away; so do the errors of its client.
        """
        ...

    async def renew(self, names: Sequence[str], seconds: float) -> set[str]:
        """Give payloads a lease of some seconds from now on; return the names of those there."""
        ...

    async def free(self, names: Iterable[str]) -> None:
        """Delete payloads; names that are unknown change nothing."""
        ...


class PayloadReader(Protocol):
    """Reader of payloads, as ranks use it. It blocks."""

    @property
    def transport(self) -> Literal["redis", "shm"]:
        """Name of its medium."""
        ...

    def read(self, addresses: Sequence[PayloadAddress]) -> Iterator[bytes | None]:
        """Yield the bytes of payloads in order, unchecked; None for one that is not there.

        Raises:
            DeadlineExceeded: The medium stayed away.
        """
        ...


def digest_payload(payload: bytes) -> str:
    """Return the digest of a payload: XXH3 of 128 bits, as chunks have."""
    # Where it is used: the base install has no xxhash, and writes samples into the stream itself.
    import xxhash

    return f"xxh3:{xxhash.xxh3_128_hexdigest(payload)}"
