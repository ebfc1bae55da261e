"""Write one rank's part of a version, chunk by chunk, in a layout that versions share."""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import Buffer

from trinity_schemas import (
    ALIGNMENT,
    CheckedEntries,
    Chunk,
    EncodedManifest,
    PartBase,
    PartDelta,
    Probes,
    TensorEntry,
    encode,
    encode_entries,
)

from ...errors import TrinityError
from ..compatibility import plain_name
from ..copy_streams import get_copy_stream
from ..deltas.tracker import LastPublished
from ..devices.device_to_host import DeviceRuns
from ..errors import FreedTensor, TransportRefused, UnpublishableDtype, UnpublishableName
from ..slices import ShardOffset
from ..tensors import (
    FormCheck,
    address,
    as_bytes,
    as_dense,
    as_plain,
    clear_bytes,
    copy_all,
    copy_bytes,
    digest,
    dtype_name,
    is_castable,
    is_freed,
    is_row_major,
    sent_dtype,
)
from ..transports.base import ChunkStore, PartRef, SegmentedSink, TensorSink, ZeroCopySink

_LONGEST_NAME, _MOST_DIMENSIONS = 256, 32
"""Characters and dimensions that the contract allows; readers refuse a part beyond them."""

Places: TypeAlias = Sequence[ShardOffset | None] | None
"""Offset of each shard, with None for a whole tensor; None if all tensors are whole."""
_ZEROS = memoryview(bytes(ALIGNMENT))
_ZEROS_AT = address(_ZEROS)
_LARGE = 1 << 20
"""Bytes from which a tensor is sent without a copy, if the transport supports that.

Below it, many small chunks cost more than the copies that they save.
"""
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


class UnpublishableTensor(TrinityError, TypeError):
    """Raised if a tensor cannot be published.

    Attributes:
        name: Name of the tensor.
        reason: What makes it so.
    """

    name: str
    reason: str
    text = (
        "{name!r} cannot be published, since {reason}: leave it out, or publish another form of it"
    )


def tensor_entry(
    name: str, tensor: torch.Tensor, place: ShardOffset | None, end: int
) -> TensorEntry:
    """Return the entry of a tensor, or shard, that follows ``end`` bytes of the part.

    Its name is the plain one, without the prefixes of torch's wrappers.

    Raises UnpublishableTensor for a dtype outside the contract, and for a tensor without elements
    in memory, such as one that is sparse or on the meta device. Raises ValueError for a name, or a
    number of dimensions, outside the contract.
    """
    if tensor.layout is not torch.strided:
        raise UnpublishableTensor(name, f"its layout is {tensor.layout}")
    if tensor.is_meta:
        raise UnpublishableTensor(name, "it is on the meta device")
    try:
        dtype = dtype_name(tensor.dtype)
    except UnpublishableDtype:
        raise UnpublishableTensor(name, f"its dtype is {tensor.dtype}") from None
    if not 0 < len(name) <= _LONGEST_NAME or tensor.dim() > _MOST_DIMENSIONS:
        raise UnpublishableName(name, tensor.dim(), _LONGEST_NAME, _MOST_DIMENSIONS)
    return TensorEntry(
        name=plain_name(name),
        dtype=dtype,
        shape=tuple(tensor.shape),
        offset=end + -end % ALIGNMENT,
        global_shape=None if place is None else place.global_shape,
        begins=None if place is None else place.begins,
    )


class PartLayout:
    """Entries of tensors that are published in full from one device, and what follows from them.

    Args:
        names: Names of the tensors.
        tensors: The tensors, or shards; none is kept.
        places: Offsets of shards.

    Raises as :func:`tensor_entry`, and ValueError for a name that appears twice.
    """

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], places: Places
    ) -> None:
        entries, end = [], 0
        for name, tensor, place in zip(names, tensors, places or [None] * len(names), strict=True):
            entries.append(tensor_entry(name, tensor, place, end))
            end = entries[-1].offset + tensor.nbytes
        self.entries = CheckedEntries(entries, based=False)
        self.encoded = encode_entries(entries)
        self.offsets = [entry.offset for entry in entries]
        self.sizes = [tensor.nbytes for tensor in tensors]
        self.ends = list(map(operator.add, self.offsets, self.sizes))
        self.has_gaps = sum(self.sizes) < end
        self._names, self._places = list(names), places
        self._form = FormCheck(tensors)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self.runs = None if self._device.type == "cpu" else DeviceRuns(tensors)
        """Runs of tensors that are copied at once; None in host memory."""

    def fits(self, names: Sequence[str], tensors: Sequence[torch.Tensor], places: Places) -> bool:
        """Return True if these tensors have this layout, and lie row-major on its device."""
        return names == self._names and places == self._places and self._form.fits(tensors)

    def read(
        self, tensors: Sequence[torch.Tensor], addresses: list[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield numbers of first tensors, and host addresses of consecutive ones from there.

        Addresses are valid until the next ones are asked for.

        Args:
            tensors: Tensors of this layout.
            addresses: Addresses of their elements, on their device.
        """
        if self.runs is None:
            yield 0, addresses
        else:
            yield from self.runs.read(tensors, get_copy_stream(self._device))


class LastLayout:
    """Layout of the part that one rank published last."""

    def __init__(self) -> None:
        self._layout: PartLayout | None = None

    def get(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], places: Places
    ) -> PartLayout | None:
        """Return the layout of these tensors; None unless all lie row-major on one device.

        Raises as :class:`PartLayout`.
        """
        if self._layout is None or not self._layout.fits(names, tensors, places):
            self._layout = None
            if len({tensor.device for tensor in tensors}) < 2 and all(map(is_row_major, tensors)):
                self._layout = PartLayout(names, tensors, places)
        return self._layout


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
        last_layout: Layout of the rank's last part, which :meth:`add_all` uses again if it fits;
            without it, tensors are added one by one.

    Raises UnpublishableDtype if ``dtype`` is not a floating-point dtype of the contract.
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
        last_layout: LastLayout | None = None,
    ) -> None:
        if dtype is not None and not (is_castable(dtype) and dtype_name(dtype)):
            raise UnpublishableDtype(str(dtype), "chosen")
        self._dtype = dtype
        self._subset = subset
        self._tensor_digests = tensor_digests
        self._part = part
        self._last = last
        self._sink = store.begin(part, chunk_bytes)
        self._on_device = self._sink if isinstance(self._sink, TensorSink) else None
        if self._on_device is not None and last is not None:
            raise TransportRefused("deltas", store.name)
        self._into = None if isinstance(self._sink, TensorSink) else self._sink
        self._direct = self._sink if isinstance(self._sink, ZeroCopySink) else None
        self._pieces = self._sink if isinstance(self._sink, SegmentedSink) else None
        self._room: memoryview | None = None
        self._address = self._size = 0
        """Address and size of the reserved memory, in bytes."""
        self._filled = 0
        self._offset = 0
        self._last_layout = last_layout
        self.probes: Probes | None = None
        """Probes of the version, which the manifest seals."""
        self._layout: PartLayout | None = None
        """Layout of the tensors that were added at once."""
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
        sent = sent_dtype(tensor.dtype, self._dtype)
        if sent != tensor.dtype:
            _check_memory(name, tensor)
            # Converted before the digest: readers compare the bytes that were sent.
            tensor = tensor.detach().to(sent)
        entry = tensor_entry(name, tensor, place, self._offset)
        tensor = as_plain(tensor) if self._on_device is None else as_dense(tensor)
        _check_memory(name, tensor)
        if self._tensor_digests:
            entry = replace(entry, digest=digest(as_bytes(tensor)))
        if self._on_device is not None:
            self._on_device.write(tensor, entry.offset)
            self._tensors.append(entry)
            self._offset = entry.offset + tensor.nbytes
            return
        if self._last is not None:
            entry, data = self._last.shrink(entry, as_bytes(tensor))
            self._append(entry.offset, address(data), len(data))
        elif self._direct is not None and tensor.nbytes >= _LARGE:
            self._send(entry.offset, self._direct, as_bytes(tensor))
        else:
            self._append(entry.offset, tensor.data_ptr(), tensor.nbytes)
        self._tensors.append(entry)

    def add_all(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], places: Places = None
    ) -> None:
        """Append tensors as :meth:`add` does, faster if they are many.

        Args:
            names: Names of the tensors.
            tensors: The tensors, or shards; they must not change until this returns.
            places: Offsets of shards.

        Raises as :meth:`add`.
        """
        layout = None
        if self._last_layout is not None and self._fits_buffers(tensors):
            # Entries, offsets and their encoding are the same at each step.
            layout = self._last_layout.get(names, tensors, places)
        if layout is None:
            places = places or [None] * len(names)
            for name, tensor, place in zip(names, tensors, places, strict=True):
                self.add(name, tensor, place)
            return
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if not all(addresses):
            for name, tensor in zip(names, tensors, strict=True):
                _check_memory(name, tensor)
        self._layout = layout
        self._tensors += layout.entries
        if self._on_device is not None:
            self._on_device.write_all(tensors, layout.offsets, layout.runs)
            self._offset = layout.ends[-1] if layout.ends else 0
            return
        for first, sources in layout.read(tensors, addresses):
            self._append_all(layout, first, sources)

    def _fits_buffers(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if the part is empty, and sent from buffers that take any tensor as it is."""
        apart = self._last or self._pieces or self._tensor_digests or self._dtype
        if apart or self._tensors:
            return False
        if self._on_device is not None:
            return True
        return self._direct is None or all(tensor.nbytes < _LARGE for tensor in tensors)

    def _append_all(self, layout: PartLayout, first: int, sources: Sequence[int]) -> None:
        """Append the bytes of consecutive tensors from their addresses, buffer by buffer."""
        at, behind = first, first + len(sources)
        while at < behind:
            if self._room is None:
                self._reserve()
            begin = self._offset - self._filled
            # All tensors that end within the buffer go in one call.
            end = bisect_right(layout.ends, begin + self._size, at, behind)
            if end == at:  # it ends behind the buffer
                self._append(layout.offsets[at], sources[at - first], layout.sizes[at])
                at += 1
                continue
            filled = layout.ends[end - 1] - begin
            # Padding is part of the chunk's digest, and the buffer has bytes of an earlier one.
            if layout.has_gaps:
                clear_bytes(self._address + self._filled, filled - self._filled)
            targets = list(map((self._address - begin).__add__, layout.offsets[at:end]))
            copy_all(targets, sources[at - first : end - first], layout.sizes[at:end])
            self._offset, self._filled, at = begin + filled, filled, end
            if self._filled == self._size:
                self._commit()

    def _append(self, offset: int, source: int, nbytes: int) -> None:
        """Append bytes from an address, which must stay valid until this returns."""
        if offset != self._offset:
            self._copy(_ZEROS_AT, offset - self._offset)
        # A tensor in two pieces of memory could not be viewed by a reader.
        if self._pieces is not None and not self._pieces.fits(self._filled, nbytes):
            if self._filled:
                self._commit()
            self._pieces.next_piece(nbytes)
        self._copy(source, nbytes)

    def _copy(self, source: int, nbytes: int) -> None:
        self._offset += nbytes
        remaining = nbytes
        while remaining:
            if self._room is None:
                self._reserve()
            fits = min(remaining, self._size - self._filled)
            copy_bytes(self._address + self._filled, source, fits)
            self._filled += fits
            source += fits
            remaining -= fits
            if self._filled == self._size:
                self._commit()

    def _send(self, offset: int, sink: ZeroCopySink, data: memoryview) -> None:
        """Append a large tensor without a copy, in chunks of its own."""
        # Nothing but the padding up to the tensor's offset.
        self._append(offset, 0, 0)
        if self._filled:
            self._commit()
        self._offset += len(data)
        for begin in range(0, len(data), sink.chunk_bytes):
            piece = data[begin : begin + sink.chunk_bytes]
            self._chunks.append(Chunk(nbytes=len(piece), digest=sink.send(piece)))
        # Else two large tensors would be alive at a time.
        if len(data) >= _LONG:
            sink.settle()

    def seal(self) -> PublishedPartReport:
        """Send the last chunk and the manifest; from now on the part can be read."""
        if self._on_device is not None:
            self._chunks = self._on_device.chunks(self._offset)
        elif self._filled:
            self._commit()
        base = self._last.base if self._last else None
        if self._layout is not None and len(self._tensors) == len(self._layout.entries):
            entries = self._layout.encoded
        else:
            entries = encode_entries(CheckedEntries(self._tensors, based=base is not None))
        manifest = encode(
            EncodedManifest(
                run_id=self._part.run_id,
                epoch=self._part.epoch,
                step=self._part.step,
                rank=self._part.rank,
                tensors=entries,
                chunks=tuple(self._chunks),
                subset=self._subset,
                base=base,
                probes=self.probes,
            )
        )
        # After all chunks: a reader that finds the manifest finds everything.
        self._sink.seal(manifest, None if base is None else self._base_ref(base))
        sealed = manifest_digest(manifest)
        return PublishedPartReport(
            manifest_digest=sealed,
            bytes=self._offset,
            tensors=len(self._tensors),
            chunks=len(self._chunks),
            # After the store has the part: a delta must not rest on a base that is not there.
            delta=self._last.seal(self._part, sealed, self._offset) if self._last else None,
        )

    def _base_ref(self, base: PartBase) -> PartRef:
        return self._part._replace(epoch=base.epoch, step=base.step)

    def discard(self) -> None:
        """Delete the chunks of a part that will not be sealed."""
        if self._last is not None:
            # The tracked copy has tensors of the part that no reader will have.
            self._last.forget()
        self._sink.discard()

    def _reserve(self) -> None:
        assert self._into is not None
        self._room = self._into.reserve()
        self._address, self._size = address(self._room), len(self._room)

    def _commit(self) -> None:
        assert self._room is not None
        data = self._room[: self._filled]
        if self._direct is not None:  # the sink digests while it sends
            self._chunks.append(Chunk(nbytes=len(data), digest=self._direct.send(data)))
        else:
            # Digested at once, while the bytes are in the cache; then readers may see them.
            self._chunks.append(Chunk(nbytes=len(data), digest=digest(data)))
            assert self._into is not None
            self._into.commit(len(data))
        self._room, self._filled = None, 0


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    if is_freed(tensor):
        raise FreedTensor(name)


def manifest_digest(manifest: Buffer) -> str:
    """Return the digest that seals an encoded manifest, and through it every chunk."""
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"
