"""Loading a version into a model that nobody serves from, with no room for the version itself.

Whoever serves meanwhile must not see half of it, and so holds all of it before any is copied: see
:mod:`~trinity_events.weights.install`. Here each chunk goes straight to where it belongs, and is
verified there: what fails on the way leaves a model that has some of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import accumulate
from typing import NamedTuple

import torch
from typing_extensions import Buffer

from trinity_schemas import StepReady, WeightManifest

from ..errors import CorruptVersion, IncompatibleWeights, VersionUnavailable
from .boxes import Box, contains, whole
from .fitting import check_covered, misfit, targets_of
from .landing import Landing, Run, Some, by_chunk
from .pull import Piece, Wanted, read_manifest, shape_of, shares
from .tensors import DTYPES, Digesting
from .transports.base import ChunkStore, PartRef, PartSource, ReceivesInto, Room

_NOWHERE = torch.empty(0, dtype=torch.uint8)


class Based(Exception):
    """The version rests on another one: it has to be pulled."""


class _Part(NamedTuple):
    ref: PartRef
    source: PartSource
    manifest: WeightManifest


def load_version(
    store: ChunkStore,
    run_id: str,
    ready: StepReady,
    module: torch.nn.Module,
    wanted: Wanted | None = None,
) -> int:
    """Fill a module with what an announcement names; returns the bytes of the whole version.

    It needs memory for one chunk, and for one tensor where those of the module are on a GPU, or
    do not lie row-major; its transport may have some more on the way.

    Args:
        store: Where the version's parts are.
        run_id: The run.
        ready: The announcement.
        module: What is filled.
        wanted: Which tensors, and which boxes of them; only chunks with some of that are read.

    Raises:
        Based: when it is a delta, before anything is changed.
        VersionUnavailable, IncompatibleWeights: before anything is changed, when it is not there
            or does not fit; the first also later, when some of it goes.
        CorruptVersion: when what is there is not what was announced; the module has some of it.
    """
    with ExitStack() as held:
        parts = [_opened(store, held, run_id, ready, index) for index in range(len(ready.parts))]
        if any(part.manifest.base is not None for part in parts):
            raise Based
        plan = _planned(module, parts, wanted)
        torch.autograd.graph.increment_version(
            [one for one in module.parameters() if not one.is_inference()]
        )
        for part, found in zip(parts, plan, strict=True):
            _fill(part, sorted(found, key=lambda some: some.offset))
    return sum(part.manifest.nbytes for part in parts)


def _opened(store: ChunkStore, held: ExitStack, run_id: str, ready: StepReady, index: int) -> _Part:
    announced = ready.parts[index]
    ref = PartRef(run_id, ready.epoch, ready.step, announced.rank)
    source = store.open(ref)
    if source is None:
        raise VersionUnavailable(f"the {ref} are not there: {store.missing(ref)}")
    held.enter_context(closing(source))
    return _Part(ref, source, read_manifest(source.manifest, ref, announced))


def _planned(
    module: torch.nn.Module, parts: Sequence[_Part], wanted: Wanted | None
) -> list[list[Some]]:
    """What of each part goes where."""
    targets = targets_of(module)
    pieces: dict[str, list[tuple[int, Piece]]] = {}
    for number, part in enumerate(parts):
        for entry in part.manifest.tensors:
            pieces.setdefault(entry.name, []).append((number, Piece(entry, _NOWHERE)))
    for name in wanted or ():
        if name not in pieces:
            raise IncompatibleWeights(f"the version has no {name!r}, which is wanted")
    names = list(pieces if wanted is None else wanted)
    plan: list[list[Some]] = [[] for _ in parts]
    for name in names:
        box = None if wanted is None else wanted[name]
        _plan_tensor(plan, targets, name, pieces[name], box)
    subset = any(part.manifest.subset for part in parts)
    if wanted is None and not subset and len(names) < len(targets):
        check_covered(targets, set(names))
    return plan


def _plan_tensor(
    plan: list[list[Some]],
    targets: dict[str, torch.Tensor],
    name: str,
    pieces: list[tuple[int, Piece]],
    wanted: Box | None,
) -> None:
    numbers = {id(piece): number for number, piece in pieces}
    shards = [piece for _, piece in pieces]
    all_of_it, dtype = whole(shape_of(name, shards)), shards[0].entry.dtype
    box = all_of_it if wanted is None else wanted
    if not contains(all_of_it, box):
        raise IncompatibleWeights(
            f"of {name!r} {list(box.shape)} from {list(box.offsets)} is wanted, but it is "
            f"{list(all_of_it.shape)} in the version"
        )
    target = targets.get(name)
    if target is None or target.shape != box.shape or target.dtype != DTYPES[dtype]:
        raise misfit(name, target, dtype, box.shape)
    landing, itemsize = Landing(target), DTYPES[dtype].itemsize
    for inner, piece in shares(name, shards, box):
        some = Some(piece.entry.offset, landing, piece.box, box, inner, itemsize)
        plan[numbers[id(piece)]].append(some)


def _fill(part: _Part, plan: list[Some]) -> None:
    """Bring one part's bytes to where they belong."""
    sizes = [chunk.nbytes for chunk in part.manifest.chunks]
    if isinstance(part.source, ReceivesInto):
        _receive(part, part.source, sizes, plan)
        return
    # They lie in memory already: they are verified there, and copied.

    def check(index: int, data: memoryview | None, digested: str | None = None) -> None:
        _check(part, index, None if data is None else len(data), digested, [data or b""])

    data = part.source.read(sizes, check, {index for index, _ in by_chunk(sizes, plan)})
    begins = [0, *accumulate(sizes)]
    for index, found in by_chunk(sizes, plan):
        for run in found:
            begin = begins[index] + run.begin
            run.room[:] = data[begin : begin + run.nbytes]
            run.landing.landed(run.nbytes)


def _receive(part: _Part, source: ReceivesInto, sizes: list[int], plan: list[Some]) -> None:
    beside = memoryview(bytearray(max(sizes, default=0)))
    """For bytes that nobody wants, but that are of a chunk which is digested as a whole."""
    coming: deque[list[Run]] = deque()

    def rooms() -> Iterator[Room]:
        for index, found in by_chunk(sizes, plan):
            coming.append(found)
            pieces, end = [], 0
            for run in found:
                pieces += [beside[end : run.begin], run.room]
                end = run.begin + run.nbytes
            yield index, [*pieces, beside[end : sizes[index]]]

    with closing(source.receive(rooms())) as received:
        for one in received:
            _check(part, one.number, one.length, one.digested, one.into)
            for run in coming.popleft():
                run.landing.landed(run.nbytes)


def _check(
    part: _Part, index: int, length: int | None, digested: str | None, pieces: Iterable[Buffer]
) -> None:
    if length is None:
        raise VersionUnavailable(f"chunk {index} of the {part.ref} is no longer there")
    chunk = part.manifest.chunks[index]
    if length == chunk.nbytes and digested != chunk.digest:
        seen = Digesting()  # what was digested too early is no proof of a fault
        for piece in pieces:
            seen.update(piece)
        digested = seen.digest()
    if length != chunk.nbytes or digested != chunk.digest:
        raise CorruptVersion(
            f"chunk {index} of the {part.ref} is not what was published: the model has some of it"
        )
