"""Pulling a version: every tensor of it, verified, or an error (invariant 7)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from trinity_schemas import (
    ContractError,
    PublishedPart,
    StepReady,
    StepRef,
    WeightManifest,
    decode_manifest,
)

from ..errors import CorruptVersion, VersionUnavailable
from .base import ChunkStore, PartRef
from .publish import manifest_digest
from .tensors import as_tensor, digest


class PulledVersion(NamedTuple):
    """A version in this process's memory, whole and verified."""

    ref: StepRef
    digest: str
    bytes: int
    parts: tuple[tuple[WeightManifest, torch.Tensor], ...]
    """Each part's manifest and its bytes, uint8 [bytes]."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, views of the pulled bytes."""
        for manifest, buffer in self.parts:
            for entry in manifest.tensors:
                yield entry.name, as_tensor(buffer, entry)


def pull_version(store: ChunkStore, run_id: str, ready: StepReady) -> PulledVersion:
    """Fetch the version that an announcement names.

    Raises:
        VersionUnavailable: when it, or some of it, is no longer there.
        CorruptVersion: when what is there is not what was announced.
    """
    if ready.kind != "weights" or ready.version_digest is None:
        raise ValueError(f"step-ready of kind {ready.kind} announces no weight version")
    parts = tuple(
        _pull_part(store, PartRef(run_id, ready.epoch, ready.step, part.rank), part)
        for part in ready.parts
    )
    return PulledVersion(
        ref=StepRef(ready.epoch, ready.step),
        digest=ready.version_digest,
        bytes=sum(manifest.nbytes for manifest, _ in parts),
        parts=parts,
    )


def _pull_part(
    store: ChunkStore, part: PartRef, announced: PublishedPart
) -> tuple[WeightManifest, torch.Tensor]:
    manifest = _read_manifest(store, part, announced)
    # Sized by a manifest whose digest the log vouches for, and whose sums were checked.
    buffer = torch.empty(manifest.nbytes, dtype=torch.uint8)
    view = buffer.numpy().data if manifest.nbytes else memoryview(bytearray())
    offset = 0
    chunks = store.get_chunks(part, len(manifest.chunks))
    for index, (chunk, data) in enumerate(zip(manifest.chunks, chunks, strict=True)):
        if data is None:
            raise VersionUnavailable(f"chunk {index} of the {part} is no longer there")
        with memoryview(data) as received:
            if len(received) != chunk.nbytes or digest(received) != chunk.digest:
                raise CorruptVersion(
                    f"chunk {index} of the {part} is not what was published: "
                    "the version is not used"
                )
            view[offset : offset + chunk.nbytes] = received
        offset += chunk.nbytes
    return manifest, buffer


def _read_manifest(store: ChunkStore, part: PartRef, announced: PublishedPart) -> WeightManifest:
    raw = store.get_manifest(part)
    if raw is None:
        raise VersionUnavailable(
            f"the {part} are not there: retired, expired, or on another server"
        )
    if manifest_digest(raw) != announced.manifest_digest:
        raise CorruptVersion(f"the manifest of the {part} is not the one that was announced")
    try:
        manifest = decode_manifest(raw)
    except ContractError as error:
        raise CorruptVersion(f"the manifest of the {part} contradicts itself: {error}") from None
    named = PartRef(manifest.run_id, manifest.epoch, manifest.step, manifest.rank)
    if named != part or manifest.nbytes != announced.bytes:
        raise CorruptVersion(f"the manifest of the {part} is of the {named}")
    return manifest
