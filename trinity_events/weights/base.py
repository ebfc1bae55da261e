"""The port of a weight transport: where a version's parts are kept between two processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class PartRef(NamedTuple):
    """One rank's part of one version."""

    run_id: str
    epoch: int
    step: int
    rank: int

    def __str__(self) -> str:
        return (
            f"weights of step {self.step} (epoch {self.epoch}, rank {self.rank}) "
            f"of run {self.run_id}"
        )


Check = Callable[[int, memoryview | None], None]
"""Is given each chunk's index and bytes, None when it is gone; raises when it will not do."""


class PartSink(Protocol):
    """Takes one part, chunk by chunk. Nobody can read it before it is sealed."""

    def room(self) -> memoryview:
        """Where the next chunk is to be written; its length is the largest that a chunk may be."""
        ...

    def put(self, nbytes: int) -> None:
        """Keep the first ``nbytes`` of the room as the next chunk."""
        ...

    def seal(self, manifest: bytes) -> None:
        """Keep the manifest: from now on the part can be read."""
        ...

    def discard(self) -> None:
        """Take back what was put of a part that will not be sealed, or is not wanted any more."""
        ...


class PartSource(Protocol):
    """One part, which stays as it is until it is closed, as far as the transport can see to it."""

    manifest: bytes

    def read(self, sizes: Sequence[int], check: Check) -> memoryview:
        """All bytes of the part, in chunks of these sizes, each of which ``check`` has seen.

        They may be the transport's own memory: they are for reading, and until :meth:`close`.
        """
        ...

    def close(self) -> None:
        """Let go of the part."""
        ...


class ChunkStore(Protocol):
    """Keeps parts. Verifies nothing: whoever reads does."""

    name: str
    """What the log calls it."""

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> PartSink:
        """Begin a part, in chunks of this size or of the transport's own."""
        ...

    def open(self, part: PartRef) -> PartSource | None:
        """The part, or None when it is not there."""
        ...

    def delete(self, part: PartRef) -> None:
        """Forget the part. Those who have it open may read on."""
        ...

    def missing(self, part: PartRef) -> str:
        """Why the part may not be there, in words."""
        ...

    def close(self) -> None:
        """Let go of connections and memory."""
        ...
