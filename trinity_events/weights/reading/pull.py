"""Pull a version: every tensor of it, verified, or an error (invariant 7)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate

from trinity_schemas import (
    PartBase,
    PublishedPart,
    StepReady,
    StepRef,
    TensorEntry,
    WeightManifest,
)

from ...errors import CorruptVersion
from ..deltas.reconstruct import FullPart, Key
from ..part_bytes import PartBytes
from ..slices import TensorSlice, byte_spans, intersection
from ..tensors import DTYPES
from ..transports.base import ChunkStore, PartRef, TensorSource
from .open_part import OpenPart, open_part
from .pulled_version import PulledVersion, Selection, slice_of

_HARM = "the version is not used"


@contextmanager
def pull_version(
    store: ChunkStore,
    run_id: str,
    ready: StepReady,
    selection: Selection | None = None,
    have: Collection[str] = (),
) -> Iterator[PulledVersion]:
    """Hold the announced version, and the base of a delta, until the block ends.

    The tensors may lie in the transport's own memory, and are valid until the block ends: copy
    those that are needed for longer.

    Args:
        store: Store that has the parts.
        run_id: The run.
        ready: The announcement.
        selection: Tensors to pull, and the slice of each. Only chunks that contain them are read
            and verified; a tensor stored as a delta is read as a whole.
        have: Manifest digests of full parts that the caller's model holds, so that deltas can be
            applied to it without their base. Ignored with ``selection``.

    Raises:
        VersionUnavailable: when the version, or a chunk of it, is gone.
        CorruptVersion: when the stored bytes are not those announced.
    """
    if ready.kind != "weights" or ready.version_digest is None:
        raise ValueError(f"step-ready of kind {ready.kind} announces no weight version")
    with ExitStack() as exit_stack:
        parts: list[tuple[WeightManifest, PartBytes]] = []
        bases: list[FullPart | None] = []
        for announced in ready.parts:
            ref = PartRef(run_id, ready.epoch, ready.step, announced.rank)
            part = open_part(store, exit_stack, ref, announced, harm=_HARM)
            chunks = None if selection is None else selected_chunks(part.manifest, selection)
            parts.append((part.manifest, _read(part, chunks)))
            base = part.manifest.base
            if base is None or (selection is None and base.manifest_digest in have):
                bases.append(None)
            else:
                changed = _changed(part.manifest, selection)
                bases.append(_read_base(store, exit_stack, ref, base, changed))
        yield PulledVersion(
            ref=StepRef(ready.epoch, ready.step),
            digest=ready.version_digest,
            bytes=sum(manifest.nbytes for manifest, _ in parts)
            + sum(base.manifest.nbytes for base in bases if base is not None),
            parts=tuple(parts),
            bases=tuple(bases),
            selection=selection,
        )


def _read_base(
    store: ChunkStore, exit_stack: ExitStack, part: PartRef, base: PartBase, keys: Container[Key]
) -> FullPart:
    """Read the full part that is the base of a delta, with the bytes of these tensors."""
    at = part._replace(epoch=base.epoch, step=base.step)
    named = PublishedPart(rank=at.rank, manifest_digest=base.manifest_digest, bytes=base.bytes)
    full = open_part(store, exit_stack, at, named, harm=_HARM, needed_by=part)
    buffer = _read(full, _chunks_of(full.manifest, keys))
    if full.manifest.base is not None:
        raise CorruptVersion(f"the {part} rest on the {at}, which are not full themselves")
    entries = {entry.key: entry for entry in full.manifest.tensors}
    return FullPart(full.manifest, entries, buffer)


def _read(part: OpenPart, indices: Container[int] | None) -> PartBytes:
    """Read a part, or some chunks of it, and verify them."""
    if not isinstance(part.source, TensorSource):
        return PartBytes(part.source.read(part.sizes, part.check, indices))
    copied, came = part.source.copied(part.sizes, indices)
    for index in range(len(part.sizes)):
        if indices is None or index in indices:
            part.check_received(index, *came.get(index, (0, None)))
    return PartBytes(copied)


def selected_chunks(manifest: WeightManifest, selection: Selection) -> set[int]:
    """Return the numbers of the chunks that contain selected bytes."""
    gap = min((chunk.nbytes for chunk in manifest.chunks), default=0)

    def spans() -> Iterator[tuple[int, int]]:
        for entry, entry_box, inner in _selected_entries(manifest, selection):
            if entry.encoding != "dense":  # a delta applies to the whole tensor
                yield entry.offset, entry.offset + entry.stored
                continue
            for begin, end in byte_spans(entry_box, inner, DTYPES[entry.dtype].itemsize, gap):
                yield entry.offset + begin, entry.offset + end

    return _chunks_with(manifest, spans())


def _selected_entries(
    manifest: WeightManifest, selection: Selection
) -> Iterator[tuple[TensorEntry, TensorSlice, TensorSlice]]:
    """Yield each selected entry, with the slice that it holds and the selected slice of that."""
    for entry in manifest.tensors:
        if entry.name not in selection:
            continue
        entry_box, box = slice_of(entry), selection[entry.name]
        inner = (
            entry_box
            if box is None or len(box.shape) != len(entry_box.shape)
            else intersection(box, entry_box)
        )
        if inner is not None:
            yield entry, entry_box, inner


def _changed(manifest: WeightManifest, selection: Selection | None) -> set[Key]:
    """Return the keys of the selected tensors that are stored as a delta."""
    entries: Iterable[TensorEntry] = manifest.tensors
    if selection is not None:
        entries = (entry for entry, _, _ in _selected_entries(manifest, selection))
    return {entry.key for entry in entries if entry.encoding != "dense"}


def _chunks_of(manifest: WeightManifest, keys: Container[Key]) -> set[int]:
    """Return the numbers of the chunks of a full part that contain these tensors."""
    entries = (entry for entry in manifest.tensors if entry.key in keys)
    spans = ((entry.offset, entry.offset + entry.part_bytes) for entry in entries)
    return _chunks_with(manifest, spans)


def _chunks_with(manifest: WeightManifest, spans: Iterable[tuple[int, int]]) -> set[int]:
    """Return the numbers of the chunks that contain any of these spans of bytes."""
    ends = list(accumulate(chunk.nbytes for chunk in manifest.chunks))
    indices: set[int] = set()
    for begin, end in spans:
        if begin < end:
            indices.update(range(bisect_right(ends, begin), bisect_right(ends, end - 1) + 1))
    return indices
