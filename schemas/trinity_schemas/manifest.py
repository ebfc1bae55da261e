"""What a part of a weight version consists of, sealed by digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from .identity import Bytes, Digest, Epoch, Name, Rank, RunId, Step

# Bytes of one element, by torch's names without the "torch." prefix.
DTYPE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
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
}

ALIGNMENT = 64
"""Bytes of which a tensor's place is a multiple, where its writer aligns them: a cache line."""

Dimension = Annotated[int, Meta(ge=0, le=2**48)]

Shape = Annotated[tuple[Dimension, ...], Meta(max_length=32)]

Encoding = Annotated[
    Literal["dense", "delta", "skip"],
    Meta(description="All elements, those that changed since the base, or none."),
]


class TensorEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One tensor, or one rank's shard of it.

    ``offset`` is where it begins in the part's bytes, row-major, unpadded: behind the one before,
    or at the next multiple of :data:`ALIGNMENT`, with zeros in between. A shard also says
    of which tensor it is a part: that one's shape, and where in each dimension the shard begins.

    In a part that rests on a base, it may be there as what changed of it, in ``stored`` bytes, or
    not at all where nothing did. It has a ``digest`` then, which is that of all its bytes; one that
    is dense may have one too.
    """

    name: Name
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Shape
    offset: Bytes
    global_shape: Annotated[
        Shape | None, Meta(description="Of a shard: shape of the whole tensor.")
    ] = None
    begins: Annotated[
        Shape | None, Meta(description="Of a shard: where it begins in each dimension.")
    ] = None
    encoding: Encoding = "dense"
    stored: Bytes = 0
    digest: Digest | None = None

    @property
    def key(self) -> tuple[str, Shape | None]:
        """By what it is told from others of its part."""
        return self.name, self.begins

    @property
    def layout(self) -> tuple[str, Shape, Shape | None]:
        """What it has in common, beside its key, with one that it may be laid over."""
        return self.dtype, self.shape, self.global_shape

    @property
    def nbytes(self) -> int:
        """Size in bytes, from shape and dtype."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def part_bytes(self) -> int:
        """Bytes that it takes in the part."""
        return self.nbytes if self.encoding == "dense" else self.stored

    def fault(self, *, based: bool) -> str | None:
        """What its encoding contradicts, in a part with a base or without."""
        if self.encoding == "dense":
            return "is dense and says what it takes" if self.stored else None
        if not based:
            return f"is a {self.encoding} in a part that rests on no other"
        if self.digest is None:
            return f"is a {self.encoding} without the digest of what it makes"
        if self.encoding == "skip" and self.stored:
            return "is skipped and takes bytes"
        if self.encoding == "delta" and not 0 < self.stored < self.nbytes:
            return f"is a delta of {self.stored} bytes of a tensor of {self.nbytes}"
        return None


class PartBase(Struct, frozen=True, kw_only=True):
    """The part, of the same rank and with all its tensors dense, that deltas rest on."""

    epoch: Epoch
    step: Step
    manifest_digest: Digest
    bytes: Bytes


class Chunk(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One piece of a part's bytes, in order."""

    nbytes: Bytes
    digest: Digest


class WeightManifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's part of a version: its tensors, laid end to end, cut into chunks.

    Decoding checks that tensors tile the bytes without overlap, and with no gap but to the next
    aligned place, and that the chunks add up to them, so that nothing is allocated by a number
    that the rest contradicts.
    """

    run_id: RunId
    epoch: Epoch
    step: Step
    rank: Rank
    tensors: tuple[TensorEntry, ...]
    chunks: tuple[Chunk, ...]
    subset: Annotated[
        bool, Meta(description="These tensors alone are new, as an adapter's; others stay.")
    ] = False
    base: PartBase | None = None

    @property
    def nbytes(self) -> int:
        """Size of the part in bytes."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def __post_init__(self) -> None:
        end, names, sizes, product = 0, set[object](), DTYPE_BYTES, math.prod
        for tensor in self.tensors:  # there may be very many: no call that can be avoided
            size = sizes.get(tensor.dtype)
            if size is None:
                raise ValueError(f"tensor {tensor.name!r} has unknown dtype {tensor.dtype!r}")
            if tensor.offset != end:
                if tensor.offset != end + -end % ALIGNMENT:
                    raise ValueError(
                        f"tensor {tensor.name!r} begins at {tensor.offset}, not at {end} "
                        f"or the next multiple of {ALIGNMENT}"
                    )
                end = tensor.offset
            if tensor.begins is None and tensor.global_shape is None:
                names.add(tensor.name)
            else:
                _check_shard(tensor)
                names.add((tensor.name, tensor.begins))
            if tensor.encoding == "dense" and not tensor.stored:
                end += product(tensor.shape) * size
            else:
                _check_encoding(tensor, based=self.base is not None)
                end += tensor.stored
        if len(names) < len(self.tensors):
            raise ValueError(f"tensor {_first_twice(self.tensors)!r} appears twice")
        if end != self.nbytes:
            raise ValueError(f"tensors take {end} bytes, chunks hold {self.nbytes}")


def _check_shard(tensor: TensorEntry) -> None:
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
        raise ValueError(
            f"tensor {tensor.name!r} is {list(tensor.shape)} from {begins}, which is no part of "
            f"a tensor of shape {whole}"
        )


def _check_encoding(tensor: TensorEntry, *, based: bool) -> None:
    fault = tensor.fault(based=based)
    if fault is not None:
        raise ValueError(f"tensor {tensor.name!r} {fault}")


def _first_twice(tensors: tuple[TensorEntry, ...]) -> str:
    seen = set[object]()
    for tensor in tensors:
        if tensor.key in seen:
            return tensor.name
        seen.add(tensor.key)
    raise AssertionError("unreachable")


def version_digest(parts: Iterable[tuple[int, str]]) -> str:
    """One digest of a whole version, from ``(rank, manifest digest)`` of its parts."""
    text = "\n".join([f"{rank} {digest}" for rank, digest in sorted(parts)])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
