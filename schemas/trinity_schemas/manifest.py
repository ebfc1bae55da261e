"""Manifest of a part of a weight version: its tensors and chunks, sealed by digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Annotated, Generic, Literal, TypeVar

from msgspec import Meta, Raw, Struct

from .errors import ManifestContradiction
from .identity import Bytes, Digest, Epoch, Name, Rank, RunId, Step
from .proof import Probes

# Bytes of one element, by torch's names without the "torch." prefix.
DTYPE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex64": 8,
}

ALIGNMENT = 64
"""Bytes to which a publisher aligns the offsets of tensors: a cache line."""

# With 32 dimensions a product may pass 2**62: sizes are compared with the chunks' as integers
# of Python, which do not overflow.
Dimension = Annotated[int, Meta(ge=0, le=2**48)]

Shape = Annotated[tuple[Dimension, ...], Meta(max_length=32)]

Encoding = Annotated[
    Literal["dense", "delta", "skip"],
    Meta(description="Elements that travel: all, those that changed since the base, or none."),
]


class TensorEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Tensor of a part, or one rank's shard of it.

    The tensor's bytes begin at ``offset`` of the part, row-major and unpadded. They follow the
    tensor before, or begin at the next multiple of :data:`ALIGNMENT` behind zeros. A shard also has
    the shape of its whole tensor, and its first index in each dimension.

    In a part that rests on a base, a delta holds the changed elements in ``stored`` bytes, and a
    skipped tensor holds none. Both have the ``digest`` of all the tensor's bytes; a dense tensor
    may have it too.
    """

    name: Name
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Shape
    offset: Bytes
    global_shape: Annotated[
        Shape | None, Meta(description="Shape of the whole tensor, for a shard.")
    ] = None
    begins: Annotated[
        Shape | None, Meta(description="First index in each dimension, for a shard.")
    ] = None
    encoding: Encoding = "dense"
    stored: Bytes = 0
    digest: Digest | None = None

    @property
    def key(self) -> tuple[str, Shape | None]:
        """Return the name and the begin, which are unique in a part."""
        return self.name, self.begins

    @property
    def layout(self) -> tuple[str, Shape, Shape | None]:
        """Return the dtype and shapes, which a base's entry of the same key must share."""
        return self.dtype, self.shape, self.global_shape

    @property
    def nbytes(self) -> int:
        """Return the size in bytes, from shape and dtype."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def part_bytes(self) -> int:
        """Return the number of bytes that it takes in the part."""
        return self.nbytes if self.encoding == "dense" else self.stored


class PartBase(Struct, frozen=True, kw_only=True):
    """Part that deltas rest on: of the same rank, with all its tensors dense."""

    epoch: Epoch
    step: Step
    manifest_digest: Digest
    bytes: Bytes


class Chunk(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Piece of a part's bytes; chunks are in order."""

    nbytes: Bytes
    digest: Digest


class CheckedEntries(tuple[TensorEntry, ...]):
    """Entries of a part, which are checked once: manifests of several versions may share them.

    Tensors do not overlap, and have no gap except to the next aligned offset. Raises
    ManifestContradiction for other entries.

    Args:
        entries: Entries in the order of their offsets.
        based: True for a part that rests on a base.
    """

    based: bool
    end: int
    """Bytes of the part that the tensors take, with the gaps between them."""

    def __new__(cls, entries: Iterable[TensorEntry], *, based: bool) -> CheckedEntries:
        """Check the entries."""
        made = super().__new__(cls, entries)
        # Kept with the tuple, so that a later manifest with these entries checks nothing again.
        made.based, made.end = based, _checked_end(made, based=based)
        return made


Entries = TypeVar("Entries")


class _Manifest(Struct, Generic[Entries], frozen=True, kw_only=True, omit_defaults=True):
    run_id: RunId
    epoch: Epoch
    step: Step
    rank: Rank
    tensors: Entries
    chunks: tuple[Chunk, ...]
    subset: Annotated[
        bool, Meta(description="Only these tensors are new, as an adapter's; the others stay.")
    ] = False
    base: PartBase | None = None
    probes: Annotated[
        Probes | None,
        Meta(description="Probes of the whole version, in the part of the first rank."),
    ] = None

    @property
    def nbytes(self) -> int:
        """Return the size of the part in bytes."""
        return sum(chunk.nbytes for chunk in self.chunks)


class EncodedManifest(_Manifest[Raw], frozen=True, kw_only=True, omit_defaults=True):
    """Manifest with its entries as they are on the wire, unchecked.

    The entries take most of the time, and are the same bytes for most versions of a model.
    """


class WeightManifest(
    _Manifest[tuple[TensorEntry, ...]], frozen=True, kw_only=True, omit_defaults=True
):
    """Manifest of one rank's part of a version: its tensors, laid end to end, cut into chunks.

    Decoding checks that tensors do not overlap, and have no gap except to the next aligned offset.
    It checks that the chunks add up to the tensors, so that readers may allocate by these numbers.
    """

    def __post_init__(self) -> None:
        entries, based = self.tensors, self.base is not None
        # Entries that were checked for a full part may have no deltas, and the other way round.
        if not isinstance(entries, CheckedEntries) or entries.based != based:
            entries = CheckedEntries(entries, based=based)
        # Readers allocate by the tensors and read by the chunks: both must be one size.
        if entries.end != self.nbytes:
            raise ManifestContradiction("sizes", actual=entries.end, expected=self.nbytes)


def _checked_end(entries: tuple[TensorEntry, ...], *, based: bool) -> int:
    end, names, sizes, product = 0, set[object](), DTYPE_BYTES, math.prod
    for tensor in entries:  # As many as 20,000 tensors: the loop avoids calls.
        size = sizes.get(tensor.dtype)
        if size is None:
            raise ManifestContradiction("dtype", tensor.name, tensor.dtype)
        if tensor.offset != end:
            if tensor.offset != end + -end % ALIGNMENT:
                raise ManifestContradiction("offset", tensor.name, tensor.offset, end)
            end = tensor.offset
        # A name alone where that is enough: the loop makes no tuple for most entries.
        if tensor.begins is None and tensor.global_shape is None:
            names.add(tensor.name)
        else:
            _check_shard(tensor)
            names.add((tensor.name, tensor.begins))
        if tensor.encoding == "dense" and not tensor.stored:
            end += product(tensor.shape) * size
        else:
            _check_encoding(tensor, based=based)
            end += tensor.stored
    if len(names) < len(entries):
        raise ManifestContradiction("twice", _first_twice(entries))
    return end


def _check_shard(tensor: TensorEntry) -> None:
    # A reader copies by these indices: a shard beyond its whole would be written past its target.
    whole, begins = tensor.global_shape, tensor.begins
    fits = (
        whole is not None
        and begins is not None
        and len(whole) == len(begins) == len(tensor.shape)
        and all(
            begin + size <= most
            for begin, size, most in zip(begins, tensor.shape, whole, strict=True)
        )
    )
    if not fits:
        raise ManifestContradiction("shard", tensor.name, list(tensor.shape), whole, begins)


def _check_encoding(tensor: TensorEntry, *, based: bool) -> None:
    if tensor.encoding == "dense":
        if tensor.stored:
            raise ManifestContradiction("stored", tensor.name)
    elif not based:
        raise ManifestContradiction("base", tensor.name, tensor.encoding)
    # What a delta gives is compared as a whole: a wrong base would else stay unseen.
    elif tensor.digest is None:
        raise ManifestContradiction("digest", tensor.name, tensor.encoding)
    elif tensor.encoding == "skip" and tensor.stored:
        raise ManifestContradiction("skip", tensor.name)
    # A delta that is not smaller is sent dense; one of no bytes is a skip.
    elif tensor.encoding == "delta" and not 0 < tensor.stored < tensor.nbytes:
        raise ManifestContradiction("delta", tensor.name, tensor.stored, tensor.nbytes)


def _first_twice(tensors: tuple[TensorEntry, ...]) -> str:
    seen = set[object]()
    for tensor in tensors:
        if tensor.key in seen:
            return tensor.name
        seen.add(tensor.key)
    raise AssertionError("unreachable")


def version_digest(parts: Iterable[tuple[int, str]]) -> str:
    """Return one digest of a version, from ``(rank, manifest digest)`` of its parts."""
    # Sorted, since the parts of a version may come in any order.
    text = "\n".join([f"{rank} {digest}" for rank, digest in sorted(parts)])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
