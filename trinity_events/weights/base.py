"""The port of a weight transport: where a version's parts are kept between two processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from typing_extensions import Buffer


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


class ChunkStore(Protocol):
    """Keeps chunks and manifests. Verifies nothing: whoever reads does."""

    name: str

    def put_chunk(self, part: PartRef, index: int, data: Buffer) -> None:
        """Keep one chunk."""
        ...

    def put_manifest(self, part: PartRef, manifest: bytes) -> None:
        """Keep the manifest: from now on the part can be read."""
        ...

    def get_manifest(self, part: PartRef) -> bytes | None:
        """The manifest, or None when the part is not there."""
        ...

    def get_chunks(self, part: PartRef, count: int) -> Iterator[Buffer | None]:
        """Chunks 0 to ``count`` - 1 in order; None for one that is not there."""
        ...

    def delete(self, part: PartRef, chunks: int) -> None:
        """Forget the part, its manifest first."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...
