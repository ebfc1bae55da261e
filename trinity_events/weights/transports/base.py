"""Protocols of a weight transport, which stores a version's parts between two processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from trinity_schemas import Chunk

from ...errors import VersionNotStored

if TYPE_CHECKING:
    import torch

    from ..devices.device_to_host import DeviceRuns


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


class Check(Protocol):
    """Callback that receives each chunk's index and bytes, or None for a missing chunk.

    It raises an error for an invalid chunk. It may copy the bytes, and several threads may call it
    at once.
    """

    def __call__(self, index: int, data: memoryview | None, digested: str | None = None) -> None:
        """Check one chunk; ``digested`` is the digest of these bytes if the writer computed it."""
        ...


Ended = Literal["sealed", "stopped", "late"]
"""Result of a prefetch: all parts are sealed, the caller stopped it, or the deadline passed."""


OnChunk: TypeAlias = Callable[[int, memoryview], None]
"""Callback that receives the chunks of a part by index, in order, before they are verified."""
OnPart: TypeAlias = Callable[[PartRef], OnChunk]
"""Callback that returns a :data:`OnChunk` for the part that begins."""


class PartSink(Protocol):
    """Writer of one part, chunk by chunk. No reader can open the part before it is sealed."""

    def reserve(self) -> memoryview:
        """Return the buffer for the next chunk; its length is the maximum size of a chunk."""
        ...

    def commit(self, nbytes: int) -> None:
        """Store the first ``nbytes`` of the reserved buffer as the next chunk."""
        ...

    def seal(self, manifest: bytes, base: PartRef | None = None) -> None:
        """Store the manifest and make the part readable.

        The store does not evict the ``base`` of a delta before the delta itself.
        """
        ...

    def discard(self) -> None:
        """Remove a part that will not be sealed, or that is no longer needed."""
        ...


@runtime_checkable
class TensorSink(Protocol):
    """Writer of one part, tensor by tensor, in the memory of the device that computes them.

    No reader can open the part before it is sealed. ``seal`` and ``discard`` have the meaning that
    they have in :class:`PartSink`.
    """

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        """Store a tensor, row-major, at an offset of the part; offsets never decrease.

        After the return, operations queued on the tensor's device may overwrite the tensor.
        """
        ...

    def write_all(
        self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], runs: DeviceRuns | None
    ) -> None:
        """Store tensors as :meth:`write` does, with an operation for each run of them.

        Args:
            tensors: Row-major tensors of one device.
            offsets: Offset of each in the part, as aligned as in a bucket.
            runs: Runs of these tensors; None stores them one by one.
        """
        ...

    def chunks(self, nbytes: int) -> list[Chunk]:
        """Return the sizes and digests of the chunks of a part of ``nbytes``."""
        ...

    def seal(self, manifest: bytes, base: PartRef | None = None) -> None:
        """Store the manifest and make the part readable."""
        ...

    def discard(self) -> None:
        """Remove the bytes of the part."""
        ...


@runtime_checkable
class ZeroCopySink(Protocol):
    """Sink that sends a chunk from the caller's memory, without a buffer of its own and a copy."""

    chunk_bytes: int
    """Maximum size of a chunk, in bytes."""

    def send(self, data: memoryview) -> str:
        """Store these bytes as the next chunk; return the digest computed while they were sent.

        The caller may change the bytes after the return. The sink releases the memory at the second
        next chunk, or in :meth:`settle`.
        """
        ...

    def settle(self) -> None:
        """Release all memory that the caller passed."""
        ...


@runtime_checkable
class SegmentedSink(Protocol):
    """Sink that stores a part in several pieces, and keeps announced bytes in one piece."""

    def fits(self, filled: int, nbytes: int) -> bool:
        """Return True if ``nbytes`` fit into the piece behind ``filled`` bytes of the buffer."""
        ...

    def next_piece(self, nbytes: int) -> None:
        """Begin another piece with space for ``nbytes``; the next buffer belongs to it."""
        ...


class PartSource(Protocol):
    """Reader of one part, which the transport protects from changes until it is closed."""

    manifest: bytes

    def read(
        self, sizes: Sequence[int], check: Check, indices: Container[int] | None = None
    ) -> Sequence[memoryview]:
        """Return all bytes of the part, in chunks of these sizes; ``check`` receives each chunk.

        The bytes come in consecutive pieces, and no piece ends within a chunk. The last piece may
        be longer than the part. Chunks that are not in ``indices`` are not read, and their
        bytes are undefined. The memory may belong to the transport: it is read-only, and valid
        until :meth:`close`.
        """
        ...

    def close(self) -> None:
        """Release the part."""
        ...


class ChunkStore(Protocol):
    """Store of parts. It verifies nothing: the reader does."""

    name: str
    """Name of the transport in the log."""

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> PartSink | TensorSink:
        """Begin a part, in chunks of ``chunk_bytes`` or of the transport's own size."""
        ...

    def open(self, part: PartRef) -> PartSource | TensorSource | None:
        """Return the part, or None if the store does not have it."""
        ...

    def delete(self, part: PartRef) -> None:
        """Delete the part. Readers that have it open can continue to read."""
        ...

    def missing(self, part: PartRef) -> VersionNotStored:
        """Return the error of a part that is missing here."""
        ...

    def close(self) -> None:
        """Release connections and memory."""
        ...


@runtime_checkable
class SupportsPrefetch(Protocol):
    """Store whose parts can be verified while they are written."""

    def prefetch(
        self,
        parts: Sequence[PartRef],
        stop: threading.Event,
        deadline: float,
        on_part: OnPart | None = None,
    ) -> Ended:
        """Digest the chunks of these parts as they arrive, so that opening them verifies less.

        The result promises nothing: a reader uses only a sealed part whose manifest is the
        announced one. Return once all parts are sealed, or after ``deadline`` seconds. The
        ``on_part`` is called for each part that is found. Its callback receives each digested chunk
        of the part. The same part may begin again.
        """
        ...


@runtime_checkable
class TensorSource(Protocol):
    """Reader of one part in a device's memory, which the transport protects until it is closed.

    The reader returns copies and digests the copies. If the part is damaged, chunks are shorter
    than requested or missing.
    """

    manifest: bytes

    def copy(
        self, sizes: Sequence[int], indices: Container[int] | None = None
    ) -> tuple[Sequence[torch.Tensor], Mapping[int, tuple[int, str]]]:
        """Return all bytes as uint8 pieces, and the size and digest of each chunk by its index.

        The pieces are consecutive, and no piece ends within a chunk. The bytes of chunks that are
        not in ``indices`` are undefined.
        """
        ...

    def each(
        self, sizes: Sequence[int], indices: Container[int]
    ) -> Iterator[tuple[int, torch.Tensor, str]]:
        """Yield index, bytes (uint8) and digest of each chunk, valid until the next one."""
        ...

    def close(self) -> None:
        """Release the part."""
        ...


ChunkBuffers: TypeAlias = tuple[int, Sequence[memoryview]]
"""Index of a chunk, and the memory pieces that its bytes fill."""


class ReceivedChunk(NamedTuple):
    """Chunk that was received into pieces of the reader's memory."""

    number: int
    """Index of the chunk."""
    into: Sequence[memoryview]
    length: int | None
    """Length of the chunk in bytes; None if it is missing.

    If the length differs from the memory's, no byte was received.
    """
    digested: str | None
    """Digest of the chunk, if it was computed on arrival."""


@runtime_checkable
class ZeroCopySource(Protocol):
    """Part whose bytes are remote, and can be received straight into the reader's memory."""

    def receive(self, rooms: Iterable[ChunkBuffers]) -> Generator[ReceivedChunk]:
        """Receive the requested chunks into these buffers."""
        ...
