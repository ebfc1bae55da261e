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

Dimension = Annotated[int, Meta(ge=0, le=2**48)]


Encoding = Annotated[
    Literal["dense", "delta", "skip"],
    Meta(description="All elements, those that changed since the base, or none."),
]


class TensorEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor: ``offset`` is where it begins in the part's bytes, row-major, unpadded.

    In a version that rests on a base, a tensor may be there as what changed of it, in ``stored``
    bytes, or not at all where nothing did. Its ``digest`` is then that of all its bytes.
    """

    name: Name
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Dimension, ...], Meta(max_length=32)]
    offset: Bytes
    encoding: Encoding = "dense"
    stored: Bytes = 0
    digest: Digest | None = None

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


class Chunk(Struct, frozen=True, kw_only=True, array_like=True):
    """One piece of a part's bytes, in order."""

    nbytes: Bytes
    digest: Digest


class WeightManifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's part of a version: its tensors, laid end to end, cut into chunks.

    Decoding checks that tensors tile the bytes without gap or overlap and that the chunks add
    up to them, so that nothing is allocated by a number that the rest contradicts.
    """

    run_id: RunId
    epoch: Epoch
    step: Step
    rank: Rank
    tensors: tuple[TensorEntry, ...]
    chunks: tuple[Chunk, ...]
    base: PartBase | None = None

    @property
    def nbytes(self) -> int:
        """Size of the part in bytes."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def __post_init__(self) -> None:
        end, names = 0, set[str]()
        for tensor in self.tensors:
            if tensor.dtype not in DTYPE_BYTES:
                raise ValueError(f"tensor {tensor.name!r} has unknown dtype {tensor.dtype!r}")
            if tensor.name in names:
                raise ValueError(f"tensor {tensor.name!r} appears twice")
            if tensor.offset != end:
                raise ValueError(f"tensor {tensor.name!r} begins at {tensor.offset}, not at {end}")
            fault = tensor.fault(based=self.base is not None)
            if fault is not None:
                raise ValueError(f"tensor {tensor.name!r} {fault}")
            names.add(tensor.name)
            end += tensor.part_bytes
        if end != self.nbytes:
            raise ValueError(f"tensors take {end} bytes, chunks hold {self.nbytes}")


def version_digest(parts: Iterable[tuple[int, str]]) -> str:
    """One digest of a whole version, from ``(rank, manifest digest)`` of its parts."""
    text = "\n".join([f"{rank} {digest}" for rank, digest in sorted(parts)])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
