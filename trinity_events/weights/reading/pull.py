"""Pull a version: every tensor of it, verified, or an error (invariant 7).

Every reader of a part verifies it through :class:`OpenPart`: manifest against the announcement, and
chunks against the manifest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
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

from ...errors import VersionVanished
from ..deltas.reconstruct import FullPart, Key, reconstruct_tensor
from ..errors import (
    AbsentTensor,
    CorruptChunk,
    CorruptManifest,
    CorruptPart,
    UnassembledTensor,
)
from ..part_bytes import PartBytes
from ..publishing.part_writer import manifest_digest
from ..slices import TensorSlice, byte_spans, contains, coverage_error, full_slice, intersection
from ..tensors import DTYPES, digest
from ..transports.base import ChunkStore, PartRef, PartSource, TensorSource

Selection: TypeAlias = Mapping[str, TensorSlice | None]
"""Selected tensors by name, each with the selected slice; None is the whole tensor."""
_HARM = "the version is not used"


class OpenPart(NamedTuple):
    """Part that its transport protects until it is closed."""

    ref: PartRef
    source: PartSource | TensorSource
    manifest: WeightManifest
    harm: str
    """Ending of the error for a chunk that is not what was published."""

    @property
    def sizes(self) -> list[int]:
        """Sizes of the chunks. They are safe: the manifest's digest is from the log."""
        return [chunk.nbytes for chunk in self.manifest.chunks]

    def check(self, index: int, data: memoryview | None, digested: str | None = None) -> None:
        """Verify a chunk in memory, as transports ask for. Raises as :meth:`check_received`."""
        length, pieces = (None, ()) if data is None else (len(data), (data,))
        self.check_received(index, length, digested, pieces)

    def check_received(
        self,
        index: int,
        length: int | None,
        digested: str | None,
        pieces: Sequence[memoryview] = (),
    ) -> None:
        """Verify a chunk that was received.

        Args:
            index: Index of the chunk.
            length: Its length in bytes; None if it is missing.
            digested: Its digest, if that was computed on arrival.
            pieces: Its bytes. A digest that was computed before the seal is no proof of a fault, so
                that bytes at hand are digested again.

        Raises:
            VersionUnavailable: when the chunk is missing.
            CorruptVersion: when it is not the published one.
        """
        if length is None:
            raise VersionVanished(str(self.ref), fault="chunk", chunk=index)
        chunk = self.manifest.chunks[index]
        if length == chunk.nbytes and digested != chunk.digest and pieces:
            digested = digest(*pieces)
        if (length, digested) != (chunk.nbytes, chunk.digest):
            raise CorruptChunk(self.ref.rank, index, version=str(self.ref), harm=self.harm)


def open_part(
    store: ChunkStore,
    exit_stack: ExitStack,
    ref: PartRef,
    announced: PublishedPart,
    *,
    harm: str,
    needed_by: PartRef | None = None,
) -> OpenPart:
    """Open a part until ``exit_stack`` closes, and check its manifest.

    Args:
        store: Store that has the part.
        exit_stack: Closes the part.
        ref: The part.
        announced: The part as it was announced.
        harm: Ending of the error for a chunk that is not what was published.
        needed_by: Part that rests on this one, for the error message.

    Raises:
        VersionUnavailable: when the part is gone.
        CorruptVersion: when its manifest is not the announced one.
    """
    source = store.open(ref)
    if source is None:
        error = store.missing(ref)
        error.needed_by = "" if needed_by is None else str(needed_by)
        raise error
    # Before the manifest is checked, whose error must release the part.
    exit_stack.enter_context(closing(source))
    return OpenPart(ref, source, _manifest(source.manifest, ref, announced), harm)


def _manifest(raw: bytes, part: PartRef, announced: PublishedPart) -> WeightManifest:
    """Decode and check a manifest. Raises CorruptVersion unless it is the announced one."""
    # Compared before it is decoded: no unverified byte is parsed.
    if manifest_digest(raw) != announced.manifest_digest:
        raise CorruptManifest(part.rank, version=str(part), fault="digest")
    try:
        manifest = decode_manifest(raw)
    except ContractError as error:
        raise CorruptManifest(
            part.rank, version=str(part), fault="contradiction", reason=str(error)
        ) from None
    # A sealed manifest of another part would pass the digest of an announcement that was mixed up.
    named = PartRef(manifest.run_id, manifest.epoch, manifest.step, manifest.rank)
    if named != part:
        raise CorruptManifest(part.rank, version=str(part), fault="part", reason=str(named))
    if manifest.nbytes != announced.bytes:
        raise CorruptManifest(
            part.rank,
            version=str(part),
            fault="size",
            size=manifest.nbytes,
            announced=announced.bytes,
        )
    return manifest


class PulledVersion(NamedTuple):
    """A whole, verified version. Valid as long as it is held."""

    ref: StepRef
    digest: str
    bytes: int
    """Size of the version, and of its base if that was pulled too."""
    parts: tuple[tuple[WeightManifest, PartBytes], ...]
    """Manifest and bytes of each part; bytes outside the selection are undefined."""
    bases: tuple[FullPart | None, ...]
    """Base of each part; None if the part is full or its base was not pulled."""
    selection: Selection | None = None
    """Selection that was pulled; None is everything."""

    @property
    def names(self) -> Collection[str]:
        """Names of all selected tensors."""
        if self.selection is not None:
            return self.selection.keys()
        return names_in(manifest for manifest, _ in self.parts)

    def by_name(self) -> dict[str, list[Piece]]:
        """Return the pieces of each selected tensor: a whole tensor, or the shards of ranks.

        Raises IncompatibleWeights when a selected tensor is not in the version.
        """
        pieces: dict[str, list[Piece]] = {}
        for (manifest, buffer), base in zip(self.parts, self.bases, strict=True):
            for entry in manifest.tensors:
                pieces.setdefault(entry.name, []).append(Piece(entry, buffer, base))
        if self.selection is None:
            return pieces
        for name in self.selection:
            if name not in pieces:
                raise AbsentTensor(name, fault="selection")
        return {name: pieces[name] for name in self.selection}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and read-only tensors, views of the pulled bytes if these are contiguous.

        Tensors assembled from shards or deltas are copies, made when the iterator reaches them.

        Raises IncompatibleWeights when shards overlap, leave a hole or disagree on a tensor, and
        for a selected slice outside the tensor. Raises CorruptVersion when a delta does not give
        the published tensor.
        """
        if self.selection is None and len(self.parts) == 1:
            [(manifest, buffer)], [base] = self.parts, self.bases
            if all(entry.begins is None for entry in manifest.tensors):  # no shards to assemble
                for entry in manifest.tensors:
                    yield entry.name, reconstruct_tensor(entry, buffer, base)
                return
        for name, pieces in self.by_name().items():
            box = None if self.selection is None else self.selection[name]
            yield name, join_pieces(name, pieces, box)


class Piece(NamedTuple):
    """One part's share of a tensor."""

    entry: TensorEntry
    buffer: PartBytes
    """Bytes of the part."""
    base: FullPart | None = None
    """Base of the part, if it was pulled."""

    @property
    def box(self) -> TensorSlice:
        """Slice of the tensor that the piece holds."""
        return get_slice(self.entry)

    def tensor(self) -> torch.Tensor:
        """Return the elements, a view if they are dense and aligned."""
        return reconstruct_tensor(self.entry, self.buffer, self.base)


def names_in(manifests: Iterable[WeightManifest]) -> Collection[str]:
    """Return the names of all tensors in the parts of a version."""
    return {entry.name for manifest in manifests for entry in manifest.tensors}


def get_slice(entry: TensorEntry) -> TensorSlice:
    """Return the slice of its tensor that an entry of a manifest holds."""
    return (
        full_slice(entry.shape) if entry.begins is None else TensorSlice(entry.begins, entry.shape)
    )


def _get_shape(name: str, pieces: list[Piece]) -> tuple[int, ...]:
    """Return the whole tensor's shape. Raises IncompatibleWeights if the pieces disagree on it."""
    forms = {(piece.entry.dtype, piece.entry.global_shape or piece.entry.shape) for piece in pieces}
    if len(forms) > 1:
        raise UnassembledTensor(name, fault="forms", forms=sorted(forms))
    return forms.pop()[1]


def selected_slice(name: str, pieces: list[Piece], box: TensorSlice | None) -> TensorSlice:
    """Return the selected slice of a tensor; ``box`` None selects the whole tensor.

    Raises IncompatibleWeights if the pieces disagree on the tensor, or the slice is outside it.
    """
    if len(pieces) > 1 and any(piece.entry.begins is None for piece in pieces):
        raise UnassembledTensor(name, fault="twice")
    all_of_it = full_slice(_get_shape(name, pieces))
    if box is None:
        return all_of_it
    if not contains(all_of_it, box):
        raise UnassembledTensor(
            name,
            fault="selection",
            selected=(list(box.shape), list(box.offsets)),
            shape=list(all_of_it.shape),
        )
    return box


def shares(name: str, pieces: list[Piece], box: TensorSlice) -> Iterator[tuple[TensorSlice, Piece]]:
    """Yield each piece that meets the selected slice, with the slice that they have in common.

    Raises IncompatibleWeights unless the pieces cover the selected slice exactly once.
    """
    # Before any copy: an overlap would take the bytes of whichever rank came last.
    coverage = coverage_error(box, [piece.box for piece in pieces])
    if coverage is not None:
        raise UnassembledTensor(name, fault="coverage", coverage=coverage)
    for piece in pieces:
        part = intersection(box, piece.box)
        if part is not None:
            yield part, piece


def join_pieces(name: str, pieces: list[Piece], box: TensorSlice | None) -> torch.Tensor:
    """Return the selected slice of a tensor, a view if one piece is it; None selects all.

    Raises IncompatibleWeights when the pieces do not make up the slice.
    """
    if len(pieces) == 1 and pieces[0].entry.begins is None:
        if box is None:
            return pieces[0].tensor()
        if pieces[0].entry.encoding == "dense":
            return pieces[0].tensor()[selected_slice(name, pieces, box).inside(pieces[0].box)]
    target_box = selected_slice(name, pieces, box)
    parts = list(shares(name, pieces, target_box))  # checked before the memory is allocated
    # Uninitialised, since the shares cover it exactly once.
    made = torch.empty(target_box.shape, dtype=DTYPES[pieces[0].entry.dtype], device="cpu")
    for part, piece in parts:
        made[part.inside(target_box)] = piece.tensor()[part.inside(piece.box)]
    return made


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
            # With a selection the base is read too: the digest of a delta is of the whole tensor.
            if base is None or (selection is None and base.manifest_digest in have):
                bases.append(None)
            else:
                changed = _changed_keys(part.manifest, selection)
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
    buffer = _read(full, _chunks_with_keys(full.manifest, keys))
    # A base is always full, so that chains are one long (decision 16).
    if full.manifest.base is not None:
        raise CorruptPart(version=str(part), fault="base", base=str(at))
    entries = {entry.key: entry for entry in full.manifest.tensors}
    return FullPart(full.manifest, entries, buffer)


def _read(part: OpenPart, indices: Container[int] | None) -> PartBytes:
    """Read a part, or some chunks of it, and verify them."""
    if not isinstance(part.source, TensorSource):
        return PartBytes(part.source.read(part.sizes, part.check, indices))
    copied, came = part.source.copy(part.sizes, indices)
    for index in range(len(part.sizes)):
        if indices is None or index in indices:
            part.check_received(index, *came.get(index, (0, None)))
    return PartBytes(copied)


def selected_chunks(manifest: WeightManifest, selection: Selection) -> set[int]:
    """Return the numbers of the chunks that contain selected bytes."""
    # Reads are by chunks, so finer spans would not save any.
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
        entry_box, box = get_slice(entry), selection[entry.name]
        inner = (
            entry_box
            if box is None or len(box.shape) != len(entry_box.shape)
            else intersection(box, entry_box)
        )
        if inner is not None:
            yield entry, entry_box, inner


def _changed_keys(manifest: WeightManifest, selection: Selection | None) -> set[Key]:
    """Return the keys of the selected tensors that are stored as a delta."""
    entries: Iterable[TensorEntry] = manifest.tensors
    if selection is not None:
        entries = (entry for entry, _, _ in _selected_entries(manifest, selection))
    return {entry.key for entry in entries if entry.encoding != "dense"}


def _chunks_with_keys(manifest: WeightManifest, keys: Container[Key]) -> set[int]:
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
