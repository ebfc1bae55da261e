"""Loading a version into a model that nobody serves from, with no room for the version itself.

Whoever serves meanwhile must not see half of it, and so holds all of it before any is copied: see
:mod:`~trinity_events.weights.install`. Here each chunk goes straight to where it belongs, and is
verified there: what fails on the way leaves a model that has some of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from typing import NamedTuple

import torch
from typing_extensions import Buffer

from trinity_schemas import StepReady, WeightManifest

from ..errors import CorruptVersion, VersionUnavailable
from .compatibility import brought_twice, is_cast, targets_of
from .copy_plan import ByteRange, PlannedSlice, about_to_change, by_chunk, plan_copies
from .devices.host_to_device import settle
from .partial_loads import PartialLoads
from .pull import read_manifest
from .pulled_version import Selection, names_in
from .speculative_load import SpeculativeLoad
from .tensors import Digesting, address
from .transports.base import (
    ChunkBuffers,
    ChunkStore,
    PartRef,
    PartSource,
    TensorSource,
    ZeroCopySource,
)
from .verify_model import check_installed


class BaseRequired(Exception):
    """The version rests on another one, or has one tensor of the model twice: it must be pulled."""


class _Part(NamedTuple):
    ref: PartRef
    source: PartSource | TensorSource
    manifest: WeightManifest


def load_version(
    store: ChunkStore,
    run_id: str,
    ready: StepReady,
    module: torch.nn.Module,
    wanted: Selection | None = None,
    ahead: SpeculativeLoad | None = None,
    torn: PartialLoads | None = None,
    *,
    cast: bool = False,
) -> list[WeightManifest]:
    """Fill a module with what an announcement names; returns the manifests of its parts.

    It needs memory for one chunk, and for one tensor where those of the module are on a GPU, or
    do not lie row-major; its transport may have some more on the way.

    Args:
        store: Where the version's parts are.
        run_id: The run.
        ready: The announcement.
        module: What is filled.
        wanted: Which tensors, and which boxes of them; only chunks with some of that are read.
        ahead: What is in the module already, and where the rest belongs.
        torn: What is not whole in the module, which is brought up to date.
        cast: Whether floating-point tensors may be of another dtype in the module. Each such one
            needs memory for itself, in the version's dtype.

    Raises:
        Based: when it is a delta, or brings one tensor of the module under two names, which have
            to be compared, before anything is changed.
        VersionUnavailable, IncompatibleWeights: before anything is changed, when it is not there
            or does not fit; the first also later, when some of it goes.
        CorruptVersion: when what is there is not what was announced; the module has some of it.
    """
    with ExitStack() as held:
        parts = [_opened(store, held, run_id, ready, index) for index in range(len(ready.parts))]
        if any(part.manifest.base is not None for part in parts):
            raise BaseRequired
        manifests = [part.manifest for part in parts]
        elsewhere = (ZeroCopySource, TensorSource)
        in_memory = not any(isinstance(part.source, elsewhere) for part in parts)
        refs = [part.ref for part in parts]
        names = names_in(manifests) if wanted is None else wanted.keys()
        torn = torn or PartialLoads()
        if cast and ahead and is_cast(targets_of(module), manifests):
            ahead.forget()
        if wanted is None and in_memory and ahead and ahead.leads(refs, module, manifests):
            with torn.until_whole(module, names):
                about_to_change(module)
                for part in parts:
                    _finish(part, ahead)
                check_installed(module, manifests)
            return manifests
        targets = targets_of(module)
        plan = plan_copies(targets, manifests, wanted, cast=cast)
        if brought_twice(targets, names):
            raise BaseRequired
        with torn.until_whole(module, names):
            about_to_change(module)
            for part, found in zip(parts, plan, strict=True):
                _fill(part, found)
            check_installed(module, manifests, wanted, cast=cast)
    return manifests


def _opened(store: ChunkStore, held: ExitStack, run_id: str, ready: StepReady, index: int) -> _Part:
    announced = ready.parts[index]
    ref = PartRef(run_id, ready.epoch, ready.step, announced.rank)
    source = store.open(ref)
    if source is None:
        raise VersionUnavailable(f"the {ref} are not there: {store.missing(ref)}")
    held.enter_context(closing(source))
    return _Part(ref, source, read_manifest(source.manifest, ref, announced))


def _fill(part: _Part, plan: list[PlannedSlice]) -> None:
    """Bring one part's bytes to where they belong."""
    sizes = [chunk.nbytes for chunk in part.manifest.chunks]
    if isinstance(part.source, ZeroCopySource):
        _receive(part, part.source, sizes, plan)
        return
    if isinstance(part.source, TensorSource):
        _copy(part, part.source, sizes, plan)
        return
    # They lie in memory already: each chunk is verified there, and copied while it is in the cache.
    wanted = dict(by_chunk(sizes, plan))

    def take(index: int, data: memoryview | None, digested: str | None = None) -> None:
        begin = address(_verified(part, index, data, digested))
        for run in wanted[index]:
            run.target.bring(run.at, begin + run.begin, run.nbytes)

    part.source.read(sizes, take, wanted)


def _copy(part: _Part, source: TensorSource, sizes: list[int], plan: list[PlannedSlice]) -> None:
    """Bring to where they belong the bytes of a part that lies on a device."""
    wanted = dict(by_chunk(sizes, plan))
    came = 0
    for index, data, digested in source.each(sizes, wanted):
        _check(part, index, len(data), digested, ())
        for run in wanted[index]:
            run.target.copy(run.at, data[run.begin : run.begin + run.nbytes])
        came += 1
    if came < len(wanted):
        what = f"the {part.ref} are shorter than what was published"
        raise CorruptVersion(what, part.ref.rank)
    settle({run.target.device for runs in wanted.values() for run in runs})


def _finish(part: _Part, ahead: SpeculativeLoad) -> None:
    """Bring to where they belong what was not there before the part was whole."""
    sizes = [chunk.nbytes for chunk in part.manifest.chunks]
    taken = ahead.taken(part.ref)

    def take(index: int, data: memoryview | None, digested: str | None = None) -> None:
        verified = _verified(part, index, data, digested)
        if index >= taken or digested != part.manifest.chunks[index].digest:
            ahead.bring(part.ref, index, verified)  # it was not when it was digested

    assert not isinstance(part.source, TensorSource)
    part.source.read(sizes, take, ahead.chunks(part.ref))


def _receive(
    part: _Part, source: ZeroCopySource, sizes: list[int], plan: list[PlannedSlice]
) -> None:
    beside = memoryview(bytearray(max(sizes, default=0)))
    """For bytes that nobody wants, but that are of a chunk which is digested as a whole."""
    coming: deque[list[ByteRange]] = deque()

    def rooms() -> Iterator[ChunkBuffers]:
        for index, found in by_chunk(sizes, plan):
            coming.append(found)
            pieces, end = [], 0
            for run in found:
                pieces += [beside[end : run.begin], run.memory]
                end = run.begin + run.nbytes
            yield index, [*pieces, beside[end : sizes[index]]]

    with closing(source.receive(rooms())) as received:
        for one in received:
            _check(part, one.number, one.length, one.digested, one.into)
            for run in coming.popleft():
                run.target.note_copied(run.nbytes)


def _verified(part: _Part, index: int, data: memoryview | None, digested: str | None) -> memoryview:
    """A chunk of a part that lies in memory, once it is what was published."""
    found = memoryview(b"") if data is None else data
    _check(part, index, None if data is None else len(data), digested, [found])
    return found


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
            f"chunk {index} of the {part.ref} is not what was published: the model has some of it",
            part.ref.rank,
            index,
        )
