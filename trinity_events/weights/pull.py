"""Pulling a version: every tensor of it, verified, or an error (invariant 7)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch

from trinity_schemas import (
    ContractError,
    PublishedPart,
    StepReady,
    StepRef,
    TensorEntry,
    WeightManifest,
    decode_manifest,
)

from ..errors import CorruptVersion, IncompatibleWeights, VersionUnavailable
from .base import ChunkStore, PartRef, PartSource
from .boxes import Box, byte_spans, common, fault_in_cover, whole
from .publish import manifest_digest
from .tensors import DTYPES, as_buffer, as_tensor, digest

Wanted: TypeAlias = Mapping[str, Box | None]
"""Tensors by name, and of each the part that is wanted; None is all of it."""


class PulledVersion(NamedTuple):
    """A version, whole and verified, for as long as it is held."""

    ref: StepRef
    digest: str
    bytes: int
    """Of the whole version."""
    parts: tuple[tuple[WeightManifest, torch.Tensor], ...]
    """Each part's manifest and its bytes, uint8 [bytes]; undefined where nothing is wanted."""
    wanted: Wanted | None = None
    """What was asked for; None is everything."""

    def by_name(self) -> dict[str, list[Piece]]:
        """What there is of every tensor that is wanted: one piece, or the shards of several ranks.

        Raises IncompatibleWeights when something that is wanted is not in the version.
        """
        found: dict[str, list[Piece]] = {}
        for manifest, buffer in self.parts:
            for entry in manifest.tensors:
                found.setdefault(entry.name, []).append(Piece(entry, buffer))
        if self.wanted is None:
            return found
        for name in self.wanted:
            if name not in found:
                raise IncompatibleWeights(f"the version has no {name!r}, which is wanted")
        return {name: found[name] for name in self.wanted}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, views of the pulled bytes where they lie together: for reading alone.

        Raises IncompatibleWeights when shards leave a hole in a tensor, or overlap.
        """
        for name, pieces in self.by_name().items():
            box = None if self.wanted is None else self.wanted[name]
            if box is None and pieces[0].entry.begins is None and len(pieces) == 1:
                yield name, pieces[0].tensor()
            else:
                yield name, _assembled(name, pieces, box)


class Piece(NamedTuple):
    """What one part has of a tensor."""

    entry: TensorEntry
    buffer: torch.Tensor
    """The part's bytes, uint8 [bytes]."""

    @property
    def box(self) -> Box:
        """Which part of the tensor it is."""
        return box_of(self.entry)

    def tensor(self) -> torch.Tensor:
        """Its elements, a view where alignment allows."""
        return as_tensor(self.buffer, self.entry)


def box_of(entry: TensorEntry) -> Box:
    """Which part of a tensor an entry of a manifest is."""
    return whole(entry.shape) if entry.begins is None else Box(entry.begins, entry.shape)


def shape_of(name: str, pieces: list[Piece]) -> tuple[int, ...]:
    """The whole tensor's shape. Raises IncompatibleWeights when the pieces do not agree on it."""
    said = {(one.entry.dtype, one.entry.global_shape or one.entry.shape) for one in pieces}
    if len(said) > 1:
        raise IncompatibleWeights(f"{name!r} is several things in the version: {sorted(said)}")
    return said.pop()[1]


def sources(name: str, pieces: list[Piece], wanted: Box) -> Iterator[tuple[Box, torch.Tensor]]:
    """What each piece has of the wanted box, and its elements.

    Raises IncompatibleWeights when together they do not have all of it, or some of it twice.
    """
    fault = fault_in_cover(wanted, [piece.box for piece in pieces])
    if fault is not None:
        raise IncompatibleWeights(f"the shards of {name!r} do not make it up: {fault}")
    for piece in pieces:
        part = common(wanted, piece.box)
        if part is not None:
            yield part, piece.tensor()[part.inside(piece.box)]


def _assembled(name: str, pieces: list[Piece], box: Box | None) -> torch.Tensor:
    box = whole(shape_of(name, pieces)) if box is None else box
    made = torch.empty(box.shape, dtype=DTYPES[pieces[0].entry.dtype])
    for part, tensor in sources(name, pieces, box):
        made[part.inside(box)] = tensor
    return made


@contextmanager
def pull_version(
    store: ChunkStore, run_id: str, ready: StepReady, wanted: Wanted | None = None
) -> Iterator[PulledVersion]:
    """Hold the version that an announcement names.

    Its tensors may lie in the transport's own memory, where they stay as they are until the block
    ends: copy what is wanted for longer.

    Args:
        store: Where its parts are.
        run_id: The run.
        ready: The announcement.
        wanted: What of it; only chunks that hold some of that are read and verified.

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
            parts.append(_read_part(source, part, announced, wanted))
        yield PulledVersion(
            ref=StepRef(ready.epoch, ready.step),
            digest=ready.version_digest,
            bytes=sum(manifest.nbytes for manifest, _ in parts),
            parts=tuple(parts),
            wanted=wanted,
        )


def _read_part(
    source: PartSource, part: PartRef, announced: PublishedPart, wanted: Wanted | None
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
    sizes = [chunk.nbytes for chunk in manifest.chunks]
    chunks = None if wanted is None else wanted_chunks(manifest, wanted)
    return manifest, as_buffer(source.read(sizes, check, chunks))


def wanted_chunks(manifest: WeightManifest, wanted: Wanted) -> set[int]:
    """Which chunks of a part hold bytes of what is wanted."""
    ends = list(accumulate(chunk.nbytes for chunk in manifest.chunks))
    gap = min((chunk.nbytes for chunk in manifest.chunks), default=0)
    found: set[int] = set()
    for entry in manifest.tensors:
        if entry.name not in wanted:
            continue
        held, box = box_of(entry), wanted[entry.name]
        inner = held if box is None or len(box.shape) != len(held.shape) else common(box, held)
        if inner is None:
            continue
        for begin, end in byte_spans(held, inner, DTYPES[entry.dtype].itemsize, gap):
            first = bisect_right(ends, entry.offset + begin)
            last = bisect_right(ends, entry.offset + end - 1)
            found.update(range(first, last + 1))
    return found


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
