"""Tensors of a version that rests on another: what it changes, over what it rests on."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from trinity_schemas import TensorEntry, WeightManifest
from trinity_schemas.manifest import DTYPE_BYTES

from ...errors import CorruptVersion
from ..part_bytes import PartBytes, as_tensor
from ..tensors import as_bytes, digest
from .encoding import digest_with, overwrite, words

Key: TypeAlias = tuple[str, tuple[int, ...] | None]
"""A tensor's name, and where its shard begins."""


class FullPart(NamedTuple):
    """A part that others rest on."""

    manifest: WeightManifest
    entries: dict[Key, TensorEntry]
    """Of its manifest, by their keys."""
    buffer: PartBytes
    """Undefined where nothing rests on it."""


def reconstructed(entry: TensorEntry, buffer: PartBytes, base: FullPart | None) -> torch.Tensor:
    """A tensor, or a shard of one, whole and verified; a view where it is dense.

    Args:
        entry: Where and how it lies in the part.
        buffer: The part's bytes.
        base: The full part that it rests on.

    Raises:
        CorruptVersion: when what it changes does not make what was published.
    """
    if entry.encoding == "dense":
        return as_tensor(buffer, entry)
    tensor = based(entry, base)
    delta = delta_of(entry, buffer)
    if not makes(entry, tensor, delta):
        raise CorruptVersion(differs(entry))
    if entry.encoding == "delta":
        tensor = tensor.clone()
        overwrite(words(as_bytes(tensor), DTYPE_BYTES[entry.dtype]), delta)
    return tensor


def based(entry: TensorEntry, base: FullPart | None) -> torch.Tensor:
    """The tensor that one is a delta of. Raises CorruptVersion when there is no such one."""
    if base is None:
        raise ValueError(f"the version was pulled without what {entry.name!r} rests on")
    found = base.entries.get(entry.key)
    if found is None or found.layout != entry.layout:
        raise CorruptVersion(f"{entry.name!r} is not in the version that it is said to rest on")
    return as_tensor(base.buffer, found)


def delta_of(entry: TensorEntry, buffer: PartBytes) -> memoryview:
    """The bytes that say what changed of a tensor; none where nothing did."""
    return as_bytes(buffer.span(entry.offset, entry.part_bytes))


def makes(entry: TensorEntry, tensor: torch.Tensor, delta: memoryview) -> bool:
    """Whether the delta, over this tensor, makes what was published; nothing is written."""
    data = as_bytes(tensor)
    if entry.encoding == "skip":
        return digest(data) == entry.digest
    return digest_with(words(data, DTYPE_BYTES[entry.dtype]), delta) == entry.digest


def differs(entry: TensorEntry) -> str:
    """What to say when it does not."""
    return f"{entry.name!r} with what changed of it is not what was published"
