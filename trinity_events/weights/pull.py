"""Pulling a version: every tensor of it, verified, or an error (invariant 7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
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
from .base import ChunkStore, PartRef, PartSource
from .publish import manifest_digest
from .tensors import as_buffer, as_tensor, digest


class PulledVersion(NamedTuple):
    """A version, whole and verified, for as long as it is held."""

    ref: StepRef
    digest: str
    bytes: int
    parts: tuple[tuple[WeightManifest, torch.Tensor], ...]
    """Each part's manifest and its bytes, uint8 [bytes]."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, views of the pulled bytes: they are for reading alone."""
        for manifest, buffer in self.parts:
            for entry in manifest.tensors:
                yield entry.name, as_tensor(buffer, entry)


@contextmanager
def pull_version(store: ChunkStore, run_id: str, ready: StepReady) -> Iterator[PulledVersion]:
    """Hold the version that an announcement names.

    Its tensors may lie in the transport's own memory, where they stay as they are until the block
    ends: copy what is wanted for longer.

    Raises:
        VersionUnavailable: when it, or some of it, is no longer there.
        CorruptVersion: when what is there is not what was announced.
    """
    if ready.kind != "weights" or ready.version_digest is None:
        raise ValueError(f"step-ready of kind {ready.kind} announces no weight version")
    with ExitStack() as held:
        parts: list[tuple[WeightManifest, torch.Tensor]] = []
        for announced in ready.parts:
            part = PartRef(run_id, ready.epoch, ready.step, announced.rank)
            source = store.open(part)
            if source is None:
                raise VersionUnavailable(f"the {part} are not there: {store.missing(part)}")
            held.enter_context(closing(source))
            parts.append(_read_part(source, part, announced))
        yield PulledVersion(
            ref=StepRef(ready.epoch, ready.step),
            digest=ready.version_digest,
            bytes=sum(manifest.nbytes for manifest, _ in parts),
            parts=tuple(parts),
        )


def _read_part(
    source: PartSource, part: PartRef, announced: PublishedPart
) -> tuple[WeightManifest, torch.Tensor]:
    manifest = _read_manifest(source.manifest, part, announced)

    def check(index: int, data: memoryview | None, digested: str | None = None) -> None:
        if data is None:
            raise VersionUnavailable(f"chunk {index} of the {part} is no longer there")
        chunk = manifest.chunks[index]
        # What was digested too early is no proof of a fault.
        if digested == chunk.digest and len(data) == chunk.nbytes:
            return
        if len(data) != chunk.nbytes or digest(data) != chunk.digest:
            raise CorruptVersion(
                f"chunk {index} of the {part} is not what was published: the version is not used"
            )

    # Sized by a manifest whose digest the log vouches for, and whose sums were checked.
    data = source.read([chunk.nbytes for chunk in manifest.chunks], check)
    return manifest, as_buffer(data)


def _read_manifest(raw: bytes, part: PartRef, announced: PublishedPart) -> WeightManifest:
    if manifest_digest(raw) != announced.manifest_digest:
        raise CorruptVersion(f"the manifest of the {part} is not the one that was announced")
    try:
        manifest = decode_manifest(raw)
    except ContractError as error:
        raise CorruptVersion(f"the manifest of the {part} contradicts itself: {error}") from None
    named = PartRef(manifest.run_id, manifest.epoch, manifest.step, manifest.rank)
    if named != part:
        raise CorruptVersion(f"the manifest of the {part} is of the {named}")
    if manifest.nbytes != announced.bytes:
        raise CorruptVersion(
            f"the manifest of the {part} is of {manifest.nbytes} bytes, "
            f"{announced.bytes} were announced"
        )
    return manifest
