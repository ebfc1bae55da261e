"""The port of a weight transport: where a version's parts are kept between two processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from trinity_schemas import Chunk

if TYPE_CHECKING:
    import torch


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
    """Is given each chunk's index and bytes, None when it is gone; raises when it will not do.

    It may take the bytes too, and may be called by several threads at once.
    """

    def __call__(self, index: int, data: memoryview | None, digested: str | None = None) -> None:
        """``digested`` is the digest of these very bytes, taken while they were written."""
        ...


Ended = Literal["sealed", "stopped", "late"]
"""How reading along ended: all parts are whole, it was told to stop, its deadline passed."""


Take: TypeAlias = Callable[[int, memoryview], None]
"""Is given the chunks of a part by their index, in order, before anybody vouches for them."""
Taker: TypeAlias = Callable[[PartRef], Take]
"""Is told which part begins."""


class PartSink(Protocol):
    """Takes one part, chunk by chunk. Nobody can read it before it is sealed."""

    def reserve(self) -> memoryview:
        """Where the next chunk is to be written; its length is the largest that a chunk may be."""
        ...

    def commit(self, nbytes: int) -> None:
        """Keep the first ``nbytes`` of the room as the next chunk."""
        ...

    def seal(self, manifest: bytes, base: PartRef | None = None) -> None:
        """Keep the manifest: from now on the part can be read.

        What it rests on, its ``base``, is not dropped before it for want of room.
        """
        ...

    def discard(self) -> None:
        """Take back what was put of a part that will not be sealed, or is not wanted any more."""
        ...


@runtime_checkable
class TensorSink(Protocol):
    """Takes one part, tensor by tensor, and keeps it on the device that computes them.

    Nobody can read it before it is sealed; that, and to discard it, is as with a
    :class:`PartSink`.
    """

    def take(self, tensor: torch.Tensor, offset: int) -> None:
        """Keep a tensor, row-major, from an offset of the part on, which never goes back.

        It may be changed once this has returned, by what its device is told to compute then.
        """
        ...

    def chunks(self, nbytes: int) -> list[Chunk]:
        """The part has so many bytes: sizes and digests of its chunks."""
        ...

    def seal(self, manifest: bytes, base: PartRef | None = None) -> None:
        """Keep the manifest: from now on the part can be read."""
        ...

    def discard(self) -> None:
        """Take back what was put."""
        ...


@runtime_checkable
class ZeroCopySink(Protocol):
    """A sink that can take a chunk from where it lies: it needs no room, and no copy."""

    chunk_bytes: int
    """The largest size of a chunk."""

    def send(self, data: memoryview) -> str:
        """Keep these bytes as the next chunk; returns their digest, taken while they were sent.

        They may change once this has returned; the memory is let go of by the next chunk but one,
        or by :meth:`settle`.
        """
        ...

    def settle(self) -> None:
        """Let go of all memory that was given."""
        ...


@runtime_checkable
class SegmentedSink(Protocol):
    """A sink that keeps a part in several pieces, and bytes together that are told of before."""

    def fits(self, filled: int, nbytes: int) -> bool:
        """Whether so many bytes have place in the piece, behind those that fill the room."""
        ...

    def next_piece(self, nbytes: int) -> None:
        """Begin another piece, with place for so many; the room is another then."""
        ...


class PartSource(Protocol):
    """One part, which stays as it is until it is closed, as far as the transport can see to it."""

    manifest: bytes

    def read(
        self, sizes: Sequence[int], check: Check, wanted: Container[int] | None = None
    ) -> Sequence[memoryview]:
        """All bytes of the part, in chunks of these sizes, each of which ``check`` has seen.

        They come in pieces that follow each other, none of which ends within a chunk; the last may
        have more behind them. Where only some chunks are wanted, by index, the others are not read:
        their bytes are there, but undefined. It may all be the transport's own memory: for reading,
        until :meth:`close`.
        """
        ...

    def close(self) -> None:
        """Let go of the part."""
        ...


class ChunkStore(Protocol):
    """Keeps parts. Verifies nothing: whoever reads does."""

    name: str
    """What the log calls it."""

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> PartSink | TensorSink:
        """Begin a part, in chunks of this size or of the transport's own."""
        ...

    def open(self, part: PartRef) -> PartSource | TensorSource | None:
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


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A store whose parts can be verified while they are still being written."""

    def prefetch(
        self,
        parts: Sequence[PartRef],
        stop: threading.Event,
        deadline: float,
        taker: Taker | None = None,
    ) -> Ended:
        """Digest what comes of these parts, so that opening them has less left to verify.

        Nothing is promised of what was read so: only a part that is sealed, and whose manifest is
        the one announced, is ever used. Returns once all are sealed, or after ``deadline`` seconds.
        A ``taker`` is asked for each part that is found, and what it returns is given each of the
        part's chunks that was digested; the same part may be begun again.
        """
        ...


@runtime_checkable
class TensorSource(Protocol):
    """One part that lies on a device, which stays as it is until it is closed, as far as that goes.

    What is got of it is a copy, and digested as such. Chunks are shorter than what is asked for, or
    left out, where the part is not what it should be.
    """

    manifest: bytes

    def copied(
        self, sizes: Sequence[int], wanted: Container[int] | None = None
    ) -> tuple[Sequence[torch.Tensor], Mapping[int, tuple[int, str]]]:
        """All bytes, uint8, in pieces that follow each other, none of which ends within a chunk.

        And of each chunk, by its index, how many bytes came, and their digest. Where only some are
        wanted, the bytes of others are undefined.
        """
        ...

    def each(
        self, sizes: Sequence[int], wanted: Container[int]
    ) -> Iterator[tuple[int, torch.Tensor, str]]:
        """Chunks by their index, uint8 [bytes], with their digests; each until the next one."""
        ...

    def close(self) -> None:
        """Let go of the part."""
        ...


ChunkBuffers: TypeAlias = tuple[int, Sequence[memoryview]]
"""A chunk's index, and the memory that it is to fill, in pieces."""


class ReceivedChunk(NamedTuple):
    """A chunk that was received into memory of the reader's, in pieces."""

    number: int
    """The chunk's index."""
    into: Sequence[memoryview]
    length: int | None
    """Of the chunk: None when it is gone; when it is not its memory's, nothing was received."""
    digested: str | None
    """Its digest, where that was taken while it came."""


@runtime_checkable
class ZeroCopySource(Protocol):
    """A part whose bytes lie elsewhere, and can be received straight to where they belong."""

    def receive(self, rooms: Iterable[ChunkBuffers]) -> Generator[ReceivedChunk]:
        """Receive chunks, as they are asked for, into these rooms."""
        ...
