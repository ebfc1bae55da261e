"""Pull a version: every tensor of it, verified, or an error (invariant 7)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import accumulate

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

from ..errors import CorruptVersion, VersionUnavailable
from .deltas.reconstruct import FullPart, Key
from .part_bytes import PartBytes
from .publish import manifest_digest
from .pulled_version import PulledVersion, Selection, slice_of
from .slices import TensorSlice, byte_spans, intersection
from .tensors import DTYPES, digest
from .transports.base import ChunkStore, PartRef, PartSource, TensorSource


@contextmanager
def pull_version(
    store: ChunkStore,
    run_id: str,
    ready: StepReady,
    wanted: Selection | None = None,
    have: Collection[str] = (),
) -> Iterator[PulledVersion]:
    """Hold the announced version, and the base of a delta, until the block ends.

    The tensors may lie in the transport's own memory, and are valid until the block ends: copy
    those that are needed for longer.

    Args:
        store: Store that has the parts.
        run_id: The run.
        ready: The announcement.
        wanted: Tensors to pull, and the slice of each. Only chunks that contain them are read and
            verified; a tensor stored as a delta is read as a whole.
        have: Manifest digests of full parts that the caller's model holds, so that deltas can be
            applied to it without their base. Ignored with ``wanted``.

    Raises:
        VersionUnavailable: when the version, or a chunk of it, is gone.
        CorruptVersion: when the stored bytes are not those announced.
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
    """Read the full part that is the base of a delta, with the bytes of these tensors."""
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
    """Read a part, or the chunks of it that ``chunks`` selects by the manifest."""
    manifest = read_manifest(source.manifest, part, announced)

    def check(index: int, data: memoryview | None, digested: str | None = None) -> None:
        if data is None:
            raise VersionUnavailable(f"chunk {index} of the {part} is no longer there")
        chunk = manifest.chunks[index]
        # A digest taken before the seal is no proof of a fault.
        if digested == chunk.digest and len(data) == chunk.nbytes:
            return
        if len(data) != chunk.nbytes or digest(data) != chunk.digest:
            raise _corrupt(part, index)

    # The sizes are safe: the manifest's digest is from the log, and its sums were checked.
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
        f"chunk {index} of the {part} is not what was published: the version is not used",
        part.rank,
        index,
    )


def wanted_chunks(manifest: WeightManifest, wanted: Selection) -> set[int]:
    """Return the numbers of the chunks that contain selected bytes."""
    gap = min((chunk.nbytes for chunk in manifest.chunks), default=0)

    def spans() -> Iterator[tuple[int, int]]:
        for entry, held, inner in _wanted_entries(manifest, wanted):
            if entry.encoding != "dense":  # a delta applies to the whole tensor
                yield entry.offset, entry.offset + entry.stored
                continue
            for begin, end in byte_spans(held, inner, DTYPES[entry.dtype].itemsize, gap):
                yield entry.offset + begin, entry.offset + end

    return _chunks_with(manifest, spans())


def _wanted_entries(
    manifest: WeightManifest, wanted: Selection
) -> Iterator[tuple[TensorEntry, TensorSlice, TensorSlice]]:
    """Yield each selected entry, with the slice that it holds and the selected slice of that."""
    for entry in manifest.tensors:
        if entry.name not in wanted:
            continue
        held, box = slice_of(entry), wanted[entry.name]
        inner = (
            held if box is None or len(box.shape) != len(held.shape) else intersection(box, held)
        )
        if inner is not None:
            yield entry, held, inner


def _changed(manifest: WeightManifest, wanted: Selection | None) -> set[Key]:
    """Return the keys of the selected tensors that are stored as a delta."""
    entries: Iterable[TensorEntry] = manifest.tensors
    if wanted is not None:
        entries = (entry for entry, _, _ in _wanted_entries(manifest, wanted))
    return {entry.key for entry in entries if entry.encoding != "dense"}


def _chunks_of(manifest: WeightManifest, keys: Container[Key]) -> set[int]:
    """Return the numbers of the chunks of a full part that contain these tensors."""
    entries = (entry for entry in manifest.tensors if entry.key in keys)
    spans = ((entry.offset, entry.offset + entry.part_bytes) for entry in entries)
    return _chunks_with(manifest, spans)


def _chunks_with(manifest: WeightManifest, spans: Iterable[tuple[int, int]]) -> set[int]:
    """Return the numbers of the chunks that contain any of these spans of bytes."""
    ends = list(accumulate(chunk.nbytes for chunk in manifest.chunks))
    found: set[int] = set()
    for begin, end in spans:
        if begin < end:
            found.update(range(bisect_right(ends, begin), bisect_right(ends, end - 1) + 1))
    return found


def read_manifest(raw: bytes, part: PartRef, announced: PublishedPart) -> WeightManifest:
    """Decode and check a manifest. Raises CorruptVersion unless it is the announced one."""
    if manifest_digest(raw) != announced.manifest_digest:
        what = f"the manifest of the {part} is not the one that was announced"
        raise CorruptVersion(what, part.rank)
    try:
        manifest = decode_manifest(raw)
    except ContractError as error:
        what = f"the manifest of the {part} contradicts itself: {error}"
        raise CorruptVersion(what, part.rank) from None
    named = PartRef(manifest.run_id, manifest.epoch, manifest.step, manifest.rank)
    if named != part:
        raise CorruptVersion(f"the manifest of the {part} is of the {named}", part.rank)
    if manifest.nbytes != announced.bytes:
        raise CorruptVersion(
            f"the manifest of the {part} is of {manifest.nbytes} bytes, "
            f"{announced.bytes} were announced",
            part.rank,
        )
    return manifest
