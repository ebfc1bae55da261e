"""Pulling a version: every tensor of it, verified, or an error (invariant 7)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
from .rebuild import FullPart, rebuilt
from .tensors import as_buffer, digest


class PulledVersion(NamedTuple):
    """A version, whole and verified, for as long as it is held."""

    ref: StepRef
    digest: str
    bytes: int
    parts: tuple[tuple[WeightManifest, torch.Tensor], ...]
    """Each part's manifest and its bytes, uint8 [bytes]."""
    bases: tuple[FullPart | None, ...]
    """Of each part, the full one that it rests on; None when it is full, or was not pulled."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, views of the pulled bytes: they are for reading alone.

        Of what is there as a delta they are copies, made as they are asked for.
        """
        for (manifest, buffer), base in zip(self.parts, self.bases, strict=True):
            for entry in manifest.tensors:
                yield entry.name, rebuilt(entry, buffer, base)


@contextmanager
def pull_version(
    store: ChunkStore, run_id: str, ready: StepReady, have: Collection[str] = ()
) -> Iterator[PulledVersion]:
    """Hold the version that an announcement names, and what it rests on where it is a delta.

    Its tensors may lie in the transport's own memory, where they stay as they are until the block
    ends: copy what is wanted for longer.

    Args:
        store: Where it is.
        run_id: The run.
        ready: The announcement.
        have: Manifest digests of full parts that need not be pulled, since deltas on them will be
            laid over what the caller has.

    Raises:
        VersionUnavailable: when it, or some of it, is no longer there.
        CorruptVersion: when what is there is not what was announced.
    """
    if ready.kind != "weights" or ready.version_digest is None:
        raise ValueError(f"step-ready of kind {ready.kind} announces no weight version")
    with ExitStack() as held:
        parts: list[tuple[WeightManifest, torch.Tensor]] = []
        bases: list[FullPart | None] = []
        for announced in ready.parts:
            part = PartRef(run_id, ready.epoch, ready.step, announced.rank)
            source = store.open(part)
            if source is None:
                raise VersionUnavailable(f"the {part} are not there: {store.missing(part)}")
            held.enter_context(closing(source))
            parts.append(_read_part(source, part, announced))
            bases.append(_read_base(store, held, part, parts[-1][0], have))
        yield PulledVersion(
            ref=StepRef(ready.epoch, ready.step),
            digest=ready.version_digest,
            bytes=sum(manifest.nbytes for manifest, _ in parts)
            + sum(base.manifest.nbytes for base in bases if base is not None),
            parts=tuple(parts),
            bases=tuple(bases),
        )


def _read_base(
    store: ChunkStore,
    held: ExitStack,
    part: PartRef,
    manifest: WeightManifest,
    have: Collection[str],
) -> FullPart | None:
    """The full part that this one rests on, if it rests on one that the caller has not."""
    base = manifest.base
    if base is None or base.manifest_digest in have:
        return None
    at = part._replace(epoch=base.epoch, step=base.step)
    source = store.open(at)
    if source is None:
        raise VersionUnavailable(
            f"the {part} rest on the {at}, which are not there: {store.missing(at)}"
        )
    held.enter_context(closing(source))
    named = PublishedPart(rank=at.rank, manifest_digest=base.manifest_digest, bytes=base.bytes)
    full, buffer = _read_part(source, at, named)
    if full.base is not None:
        raise CorruptVersion(f"the {part} rest on the {at}, which are not full themselves")
    return FullPart(full, {entry.name: entry for entry in full.tensors}, buffer)


def _read_part(
    source: PartSource, part: PartRef, announced: PublishedPart
) -> tuple[WeightManifest, torch.Tensor]:
    manifest = _read_manifest(source.manifest, part, announced)

    def check(index: int, data: memoryview | None) -> None:
        if data is None:
            raise VersionUnavailable(f"chunk {index} of the {part} is no longer there")
        chunk = manifest.chunks[index]
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
