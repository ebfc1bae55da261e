"""Publish one rank's part of a version, chunk by chunk."""

from __future__ import annotations

import hashlib

import torch
from msgspec import Struct
from typing_extensions import Buffer

from trinity_schemas import (
    ALIGNMENT,
    Chunk,
    PartBase,
    PartDelta,
    TensorEntry,
    WeightManifest,
    encode,
)

from .deltas.tracker import LastPublished
from .slices import ShardOffset
from .tensors import (
    address,
    as_bytes,
    as_dense,
    as_plain,
    copy_bytes,
    digest,
    dtype_name,
    is_freed,
)
from .transports.base import ChunkStore, PartRef, SegmentedSink, TensorSink, ZeroCopySink

_ZEROS = memoryview(bytes(ALIGNMENT))
_ZEROS_AT = address(_ZEROS)
_LARGE = 1 << 20
"""Bytes from which a tensor is sent without a copy, if the transport supports that.

Below it, many small chunks cost more than the copies that they save.
"""
_LONGEST_NAME, _MOST_DIMENSIONS = 256, 32
"""Characters and dimensions that the contract allows; readers refuse a part beyond them."""
_LONG = 8 << 20
"""Bytes from which a sent tensor's memory is released at once, not with the next tensor."""


class PublishedPartReport(Struct, frozen=True, kw_only=True):
    """Summary of a published part."""

    manifest_digest: str
    bytes: int
    tensors: int
    chunks: int
    delta: PartDelta | None = None
    """Counts of the delta; None for a full part."""


class PartWriter:
    """Writer of one part: appends tensors to the memory that the transport reserves.

    Each tensor begins at a multiple of :data:`~trinity_schemas.ALIGNMENT`: aligned tensors are
    copied a fifth faster, and readers can view them in place.

    Each chunk is digested as soon as it is full. A transport that keeps tensors on their device
    copies and digests them there itself.

    Args:
        store: Store that receives the part.
        part: Run, epoch, step and rank of the part.
        chunk_bytes: Largest size of a chunk; by default the transport's choice.
        subset: The version has only some of the model's tensors, such as an adapter.
        last: Tracker of the rank's last version, from which deltas are made; its ``begin`` was
            called for the part. Without it, all tensors are sent in full.
        tensor_digests: Add a digest of each tensor to the manifest, to verify models with.
        dtype: Floating-point dtype to send in; by default each tensor keeps its own. Digests are
            of the bytes sent.

    Raises TypeError if ``dtype`` is not a floating-point dtype of the contract.
    """

    def __init__(
        self,
        store: ChunkStore,
        part: PartRef,
        chunk_bytes: int | None = None,
        *,
        subset: bool = False,
        last: LastPublished | None = None,
        tensor_digests: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        if dtype is not None and not (dtype.is_floating_point and dtype_name(dtype)):
            raise TypeError(
                f"weights cannot be published as {dtype}: choose a floating-point dtype"
            )
        self._dtype = dtype
        self._subset = subset
        self._tensor_digests = tensor_digests
        self._part = part
        self._last = last
        self._sink = store.begin(part, chunk_bytes)
        self._on_device = self._sink if isinstance(self._sink, TensorSink) else None
        if self._on_device is not None and last is not None:
            raise ValueError(f"what changed is found on the host: {store.name} sends full versions")
        self._into = None if isinstance(self._sink, TensorSink) else self._sink
        self._direct = self._sink if isinstance(self._sink, ZeroCopySink) else None
        self._pieces = self._sink if isinstance(self._sink, SegmentedSink) else None
        self._room: memoryview | None = None
        self._address = self._size = 0
        """Address and size of the reserved memory, in bytes."""
        self._filled = 0
        self._offset = 0
        self._tensors: list[TensorEntry] = []
        self._chunks: list[Chunk] = []

    def add(self, name: str, tensor: torch.Tensor, place: ShardOffset | None = None) -> None:
        """Append a tensor, or a shard of one.

        Raises TypeError for a dtype outside the contract. Raises ValueError for a name outside the
        contract, and for a tensor without memory.

        Args:
            name: The tensor's name.
            tensor: The elements of the tensor, or of this rank's shard.
            place: Offset of a shard, and the shape of the whole tensor; None for a whole tensor.
        """
        if self._dtype is not None and tensor.is_floating_point():
            _check_memory(name, tensor)
            tensor = tensor.detach().to(self._dtype)
        dtype = dtype_name(tensor.dtype)
        if not 0 < len(name) <= _LONGEST_NAME or tensor.dim() > _MOST_DIMENSIONS:
            raise ValueError(
                f"{name[:80]!r} of {tensor.dim()} dimensions cannot be published: a name has 1 to "
                f"{_LONGEST_NAME} characters, and a tensor at most {_MOST_DIMENSIONS} dimensions"
            )
        tensor = as_plain(tensor) if self._on_device is None else as_dense(tensor)
        _check_memory(name, tensor)
        offset = self._offset + -self._offset % ALIGNMENT
        digested = digest(as_bytes(tensor)) if self._tensor_digests else None
        if place is None:
            entry = TensorEntry(
                name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset, digest=digested
            )
        else:
            entry = TensorEntry(
                name=name,
                dtype=dtype,
                shape=tuple(tensor.shape),
                offset=offset,
                digest=digested,
                global_shape=place.global_shape,
                begins=place.begins,
            )
        if self._on_device is not None:
            self._on_device.take(tensor, offset)
            self._tensors.append(entry)
            self._offset = offset + tensor.nbytes
        elif self._last is None and self._direct is not None and tensor.nbytes >= _LARGE:
            self._send(entry, self._direct, as_bytes(tensor))
        elif self._last is None:
            self._append(entry, tensor.data_ptr(), tensor.nbytes)
        else:
            entry, data = self._last.shrunk(entry, as_bytes(tensor))
            self._append(entry, address(data), len(data))

    def _append(self, entry: TensorEntry, source: int, nbytes: int) -> None:
        """Append bytes from an address, which must stay valid until this returns."""
        self._tensors.append(entry)
        if entry.offset != self._offset:
            self._copy(_ZEROS_AT, entry.offset - self._offset)
        if self._pieces is not None and not self._pieces.fits(self._filled, nbytes):
            if self._filled:
                self._put()
            self._pieces.next_piece(nbytes)
        self._copy(source, nbytes)

    def _copy(self, source: int, nbytes: int) -> None:
        self._offset += nbytes
        left = nbytes
        while left:
            if self._room is None:
                self._take_room()
            fits = min(left, self._size - self._filled)
            copy_bytes(self._address + self._filled, source, fits)
            self._filled += fits
            source += fits
            left -= fits
            if self._filled == self._size:
                self._put()

    def _send(self, entry: TensorEntry, sink: ZeroCopySink, data: memoryview) -> None:
        """Append a large tensor without a copy, in chunks of its own."""
        self._append(entry, 0, 0)
        if self._filled:
            self._put()
        self._offset += len(data)
        for begin in range(0, len(data), sink.chunk_bytes):
            piece = data[begin : begin + sink.chunk_bytes]
            self._chunks.append(Chunk(nbytes=len(piece), digest=sink.send(piece)))
        if len(data) >= _LONG:
            sink.settle()

    def seal(self) -> PublishedPartReport:
        """Send the last chunk and the manifest; from now on the part can be read."""
        if self._on_device is not None:
            self._chunks = self._on_device.chunks(self._offset)
        elif self._filled:
            self._put()
        base = self._last.base if self._last else None
        manifest = encode(
            WeightManifest(
                run_id=self._part.run_id,
                epoch=self._part.epoch,
                step=self._part.step,
                rank=self._part.rank,
                tensors=tuple(self._tensors),
                chunks=tuple(self._chunks),
                subset=self._subset,
                base=base,
            )
        )
        self._sink.seal(manifest, None if base is None else self._resting_on(base))
        sealed = manifest_digest(manifest)
        return PublishedPartReport(
            manifest_digest=sealed,
            bytes=self._offset,
            tensors=len(self._tensors),
            chunks=len(self._chunks),
            delta=self._last.sealed(self._part, sealed, self._offset) if self._last else None,
        )

    def _resting_on(self, base: PartBase) -> PartRef:
        return self._part._replace(epoch=base.epoch, step=base.step)

    def discard(self) -> None:
        """Delete the chunks of a part that will not be sealed."""
        if self._last is not None:
            self._last.forget()
        self._sink.discard()

    def _take_room(self) -> None:
        assert self._into is not None
        self._room = self._into.reserve()
        self._address, self._size = address(self._room), len(self._room)

    def _put(self) -> None:
        assert self._room is not None
        data = self._room[: self._filled]
        if self._direct is not None:  # the sink digests while it sends
            self._chunks.append(Chunk(nbytes=len(data), digest=self._direct.send(data)))
        else:
            self._chunks.append(Chunk(nbytes=len(data), digest=digest(data)))
            assert self._into is not None
            self._into.commit(len(data))
        self._room, self._filled = None, 0


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    if is_freed(tensor):
        raise ValueError(f"{name!r} has no memory (it was freed): bring it back first")


def manifest_digest(manifest: Buffer) -> str:
    """Return the digest that seals an encoded manifest, and through it every chunk."""
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"
