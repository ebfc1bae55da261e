"""Reconstruct the tensors of a delta version from the delta and its base."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from trinity_schemas import TensorEntry, WeightManifest
from trinity_schemas.manifest import DTYPE_BYTES

from ..errors import CorruptTensor
from ..part_bytes import PartBytes, as_tensor
from ..tensors import as_bytes, digest
from .encoding import digest_with, overwrite, words

Key: TypeAlias = tuple[str, tuple[int, ...] | None]
"""Name of a tensor, and the offsets of its shard."""


class FullPart(NamedTuple):
    """A full part, the base of delta parts."""

    manifest: WeightManifest
    entries: dict[Key, TensorEntry]
    """Entries of the manifest, by key."""
    buffer: PartBytes
    """Bytes of the part; only tensors with a delta were read, others are undefined."""


def reconstruct_tensor(
    entry: TensorEntry, buffer: PartBytes, base: FullPart | None
) -> torch.Tensor:
    """Return a tensor, or a shard, whole and verified; a view if it is dense.

    Args:
        entry: Entry of the tensor in the manifest.
        buffer: Bytes of the part.
        base: Base of the part.

    Raises:
        CorruptVersion: when base and delta do not give the published tensor.
    """
    if entry.encoding == "dense":
        return as_tensor(buffer, entry)
    tensor = get_base(entry, base)
    delta = get_delta(entry, buffer)
    # Before the clone: a wrong delta costs no memory.
    if not makes(entry, tensor, delta):
        raise CorruptTensor(fault="delta", tensor=entry.name)
    if entry.encoding == "delta":
        # The base may lie in the transport's memory, which is read-only.
        tensor = tensor.clone()
        overwrite(words(as_bytes(tensor), DTYPE_BYTES[entry.dtype]), delta)
    return tensor


def get_base(entry: TensorEntry, base: FullPart | None) -> torch.Tensor:
    """Return the base of a tensor. Raises CorruptVersion if the base part does not have it."""
    if base is None:
        raise ValueError(f"the version was pulled without what {entry.name!r} rests on")
    base_entry = base.entries.get(entry.key)
    # Positions of another shape would overwrite other elements.
    if base_entry is None or base_entry.layout != entry.layout:
        raise CorruptTensor(fault="base", tensor=entry.name)
    return as_tensor(base.buffer, base_entry)


def get_delta(entry: TensorEntry, buffer: PartBytes) -> memoryview:
    """Return the delta of a tensor; empty if nothing changed."""
    return as_bytes(buffer.span(entry.offset, entry.part_bytes))


def makes(entry: TensorEntry, tensor: torch.Tensor, delta: memoryview) -> bool:
    """Return True if the delta gives the published tensor over this one. Nothing is written."""
    data = as_bytes(tensor)
    if entry.encoding == "skip":
        return digest(data) == entry.digest
    return digest_with(words(data, DTYPE_BYTES[entry.dtype]), delta) == entry.digest
