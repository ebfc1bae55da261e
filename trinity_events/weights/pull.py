"""Pulling a version: every tensor of it, verified, or an error (invariant 7)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch

from trinity_schemas import (
    ContractError,
    PartBase,
    PublishedPart,
    StepReady,
    StepRef,
    TensorEntry,
    WeightManifest,
    decode_manifest,
)

from ..errors import CorruptVersion, IncompatibleWeights, VersionUnavailable
from .boxes import Box, byte_spans, common, contains, fault_in_cover, whole
from .deltas.rebuild import FullPart, Key, rebuilt
from .part_bytes import PartBytes
from .publish import manifest_digest
from .tensors import DTYPES, digest
from .transports.base import ChunkStore, PartRef, PartSource, TensorSource

Wanted: TypeAlias = Mapping[str, Box | None]
"""Tensors by name, and of each the part that is wanted; None is all of it."""


class PulledVersion(NamedTuple):
    """A version, whole and verified, for as long as it is held."""

    ref: StepRef
    digest: str
    bytes: int
    """Of the whole version, and of what it rests on where that was pulled too."""
    parts: tuple[tuple[WeightManifest, PartBytes], ...]
    """Each part's manifest and its bytes, undefined where nothing is wanted."""
    bases: tuple[FullPart | None, ...]
    """Of each part, the full one that it rests on; None when it is full, or was not pulled."""
    wanted: Wanted | None = None
    """What was asked for; None is everything."""

    @property
    def names(self) -> Collection[str]:
        """Of all tensors that are wanted."""
        if self.wanted is not None:
            return self.wanted.keys()
        return names_in(manifest for manifest, _ in self.parts)

    def by_name(self) -> dict[str, list[Piece]]:
        """What there is of every tensor that is wanted: one piece, or the shards of several ranks.

        Raises IncompatibleWeights when something that is wanted is not in the version.
        """
        found: dict[str, list[Piece]] = {}
        for (manifest, buffer), base in zip(self.parts, self.bases, strict=True):
            for entry in manifest.tensors:
                found.setdefault(entry.name, []).append(Piece(entry, buffer, base))
        if self.wanted is None:
            return found
        for name in self.wanted:
            if name not in found:
                raise IncompatibleWeights(f"the version has no {name!r}, which is wanted")
        return {name: found[name] for name in self.wanted}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, views of the pulled bytes where they lie together: for reading alone.

        Of what is there as a delta they are copies, made as they are asked for.

        Raises IncompatibleWeights when shards leave a hole in a tensor, overlap, or do not agree on
        it, or it has not the box that is wanted, and CorruptVersion when what changed does not make
        what was published.
        """
        if self.wanted is None and len(self.parts) == 1:
            [(manifest, buffer)], [base] = self.parts, self.bases
            if all(entry.begins is None for entry in manifest.tensors):  # nothing to put together
                for entry in manifest.tensors:
                    yield entry.name, rebuilt(entry, buffer, base)
                return
        for name, pieces in self.by_name().items():
            box = None if self.wanted is None else self.wanted[name]
            if box is None and pieces[0].entry.begins is None and len(pieces) == 1:
                yield name, pieces[0].tensor()
            else:
                yield name, _assembled(name, pieces, box)


class Piece(NamedTuple):
    """What one part has of a tensor."""

    entry: TensorEntry
    buffer: PartBytes
    """The part's."""
    base: FullPart | None = None
    """What the part rests on, where it was pulled."""

    @property
    def box(self) -> Box:
        """Which part of the tensor it is."""
        return box_of(self.entry)

    def tensor(self) -> torch.Tensor:
        """Its elements, a view where alignment allows and it is no delta."""
        return rebuilt(self.entry, self.buffer, self.base)


def names_in(manifests: Iterable[WeightManifest]) -> Collection[str]:
    """Of all tensors of a version's parts."""
    return {entry.name for manifest in manifests for entry in manifest.tensors}


def box_of(entry: TensorEntry) -> Box:
    """Which part of a tensor an entry of a manifest is."""
    return whole(entry.shape) if entry.begins is None else Box(entry.begins, entry.shape)


def shape_of(name: str, pieces: list[Piece]) -> tuple[int, ...]:
    """The whole tensor's shape. Raises IncompatibleWeights when the pieces do not agree on it."""
    said = {(one.entry.dtype, one.entry.global_shape or one.entry.shape) for one in pieces}
    if len(said) > 1:
        raise IncompatibleWeights(f"{name!r} is several things in the version: {sorted(said)}")
    return said.pop()[1]


def wanted_box(name: str, pieces: list[Piece], wanted: Box | None) -> Box:
    """Which part of a tensor is wanted; None is all of it.

    Raises IncompatibleWeights when the pieces do not agree on what they are of, or that has no such
    part.
    """
    if len(pieces) > 1 and any(piece.entry.begins is None for piece in pieces):
        raise IncompatibleWeights(f"{name!r} comes twice in the version, whole once at least")
    all_of_it = whole(shape_of(name, pieces))
    if wanted is None:
        return all_of_it
    if not contains(all_of_it, wanted):
        raise IncompatibleWeights(
            f"of {name!r} {list(wanted.shape)} from {list(wanted.offsets)} is wanted, but it is "
            f"{list(all_of_it.shape)} in the version"
        )
    return wanted


def shares(name: str, pieces: list[Piece], wanted: Box) -> Iterator[tuple[Box, Piece]]:
    """What each piece has of the wanted box.

    Raises IncompatibleWeights when together they do not have all of it, or some of it twice.
    """
    fault = fault_in_cover(wanted, [piece.box for piece in pieces])
    if fault is not None:
        raise IncompatibleWeights(f"the shards of {name!r} do not make it up: {fault}")
    for piece in pieces:
        part = common(wanted, piece.box)
        if part is not None:
            yield part, piece


def _assembled(name: str, pieces: list[Piece], wanted: Box | None) -> torch.Tensor:
    box = wanted_box(name, pieces, wanted)
    parts = list(shares(name, pieces, box))  # they have what the room is made for
    made = torch.empty(box.shape, dtype=DTYPES[pieces[0].entry.dtype], device="cpu")
    for part, piece in parts:
        made[part.inside(box)] = piece.tensor()[part.inside(piece.box)]
    return made


@contextmanager
def pull_version(
    store: ChunkStore,
    run_id: str,
    ready: StepReady,
    wanted: Wanted | None = None,
    have: Collection[str] = (),
) -> Iterator[PulledVersion]:
    """Hold the version that an announcement names, and what it rests on where it is a delta.

    Its tensors may lie in the transport's own memory, where they stay as they are until the block
    ends: copy what is wanted for longer.

    Args:
        store: Where its parts are.
        run_id: The run.
        ready: The announcement.
        wanted: What of it; only chunks that hold some of that are read and verified, and all that a
            tensor takes that is there as a delta.
        have: Manifest digests of full parts that need not be pulled, since deltas on them will be
            laid over what the caller has. Of no use where only some is wanted.

    Raises:
        VersionUnavailable: when it, or some of it, is no longer there.
        CorruptVersion: when what is there is not what was announced.
    """
    if ready.kind != "weights" or ready.version_digest is None:
        raise ValueError(f"step-ready of kind {ready.kind} announces no weight version")
    with ExitStack() as held:
        parts: list[tuple[WeightManifest, PartBytes]] = []
        bases: list[FullPart | None] = []
        for announced in ready.parts:
            part = PartRef(run_id, ready.epoch, ready.step, announced.rank)
            source = store.open(part)
            if source is None:
                raise VersionUnavailable(f"the {part} are not there: {store.missing(part)}")
            held.enter_context(closing(source))
            chunks = None if wanted is None else partial(wanted_chunks, wanted=wanted)
            manifest, buffer = _read_part(source, part, announced, chunks)
            parts.append((manifest, buffer))
            base = manifest.base
            if base is None or (wanted is None and base.manifest_digest in have):
                bases.append(None)
            else:
                changed = _changed(manifest, wanted)
                bases.append(_read_base(store, held, part, base, changed))
        yield PulledVersion(
            ref=StepRef(ready.epoch, ready.step),
            digest=ready.version_digest,
            bytes=sum(manifest.nbytes for manifest, _ in parts)
            + sum(base.manifest.nbytes for base in bases if base is not None),
            parts=tuple(parts),
            bases=tuple(bases),
            wanted=wanted,
        )


def _read_base(
    store: ChunkStore, held: ExitStack, part: PartRef, base: PartBase, keys: Container[Key]
) -> FullPart:
    """The full part that one rests on, with what is in it of these tensors."""
    at = part._replace(epoch=base.epoch, step=base.step)
    source = store.open(at)
    if source is None:
        raise VersionUnavailable(
            f"the {part} rest on the {at}, which are not there: {store.missing(at)}"
        )
    held.enter_context(closing(source))
    named = PublishedPart(rank=at.rank, manifest_digest=base.manifest_digest, bytes=base.bytes)
    full, buffer = _read_part(source, at, named, partial(_chunks_of, keys=keys))
    if full.base is not None:
        raise CorruptVersion(f"the {part} rest on the {at}, which are not full themselves")
    return FullPart(full, {entry.key: entry for entry in full.tensors}, buffer)


def _read_part(
    source: PartSource | TensorSource,
    part: PartRef,
    announced: PublishedPart,
    chunks: Callable[[WeightManifest], Container[int]] | None = None,
) -> tuple[WeightManifest, PartBytes]:
    """A part, or those chunks of it that are told by its manifest."""
    manifest = read_manifest(source.manifest, part, announced)

    def check(index: int, data: memoryview | None, digested: str | None = None) -> None:
        if data is None:
            raise VersionUnavailable(f"chunk {index} of the {part} is no longer there")
        chunk = manifest.chunks[index]
        # What was digested too early is no proof of a fault.
        if digested == chunk.digest and len(data) == chunk.nbytes:
            return
        if len(data) != chunk.nbytes or digest(data) != chunk.digest:
            raise _corrupt(part, index)

    # Sized by a manifest whose digest the log vouches for, and whose sums were checked.
    sizes = [chunk.nbytes for chunk in manifest.chunks]
    wanted = None if chunks is None else chunks(manifest)
    if isinstance(source, TensorSource):
        copied, came = source.copied(sizes, wanted)
        for index, chunk in enumerate(manifest.chunks):
            asked = wanted is None or index in wanted
            if asked and came.get(index) != (chunk.nbytes, chunk.digest):
                raise _corrupt(part, index)
        return manifest, PartBytes(copied)
    return manifest, PartBytes(source.read(sizes, check, wanted))


def _corrupt(part: PartRef, index: int) -> CorruptVersion:
    return CorruptVersion(
        f"chunk {index} of the {part} is not what was published: the version is not used"
    )


def wanted_chunks(manifest: WeightManifest, wanted: Wanted) -> set[int]:
    """Which chunks of a part hold bytes of what is wanted."""
    gap = min((chunk.nbytes for chunk in manifest.chunks), default=0)

    def spans() -> Iterator[tuple[int, int]]:
        for entry, held, inner in _wanted_entries(manifest, wanted):
            if entry.encoding != "dense":  # what changed is laid over all of it
                yield entry.offset, entry.offset + entry.stored
                continue
            for begin, end in byte_spans(held, inner, DTYPES[entry.dtype].itemsize, gap):
                yield entry.offset + begin, entry.offset + end

    return _chunks_with(manifest, spans())


def _wanted_entries(
    manifest: WeightManifest, wanted: Wanted
) -> Iterator[tuple[TensorEntry, Box, Box]]:
    """Tensors of which something is wanted: what is there of each, and what of that is wanted."""
    for entry in manifest.tensors:
        if entry.name not in wanted:
            continue
        held, box = box_of(entry), wanted[entry.name]
        inner = held if box is None or len(box.shape) != len(held.shape) else common(box, held)
        if inner is not None:
            yield entry, held, inner


def _changed(manifest: WeightManifest, wanted: Wanted | None) -> set[Key]:
    """Tensors that are wanted and are there as a delta."""
    entries: Iterable[TensorEntry] = manifest.tensors
    if wanted is not None:
        entries = (entry for entry, _, _ in _wanted_entries(manifest, wanted))
    return {entry.key for entry in entries if entry.encoding != "dense"}


def _chunks_of(manifest: WeightManifest, keys: Container[Key]) -> set[int]:
    """Which chunks of a full part hold bytes of these tensors."""
    entries = (entry for entry in manifest.tensors if entry.key in keys)
    spans = ((entry.offset, entry.offset + entry.part_bytes) for entry in entries)
    return _chunks_with(manifest, spans)


def _chunks_with(manifest: WeightManifest, spans: Iterable[tuple[int, int]]) -> set[int]:
    """Which chunks of a part hold its bytes from ``begin`` to ``end``."""
    ends = list(accumulate(chunk.nbytes for chunk in manifest.chunks))
    found: set[int] = set()
    for begin, end in spans:
        if begin < end:
            found.update(range(bisect_right(ends, begin), bisect_right(ends, end - 1) + 1))
    return found


def read_manifest(raw: bytes, part: PartRef, announced: PublishedPart) -> WeightManifest:
    """The manifest, once its digest is the announced one; raises CorruptVersion otherwise."""
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
