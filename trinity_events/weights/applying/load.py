"""Load a version into an idle model, without memory for the version itself.

A serving model must not see half of a version, so all of it is verified before any is copied: see
:mod:`~trinity_events.weights.applying.install`. Here each chunk is copied straight into the model
and is verified there. A failure on the way leaves a model with bytes of two versions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import ClassVar, Literal, NamedTuple

import torch

from trinity_schemas import StepReady, WeightManifest, WeightsProof

from ...errors import StructuredError
from ..compatibility import find_targets, is_cast
from ..devices.host_to_device import settle
from ..errors import CorruptPart
from ..reading.pull import OpenPart, Selection, names_in, open_part
from ..tensors import address
from ..transports.base import ChunkBuffers, ChunkStore, PartRef, TensorSource, ZeroCopySource
from .copy_plan import PartPlan, plan_copies
from .copy_target import ByteRange, CopyTarget, about_to_change, by_chunk, copy_targets
from .partial_loads import PartialLoads
from .speculative_load import SpeculativeLoad
from .verify_model import ALL_COMPARED, InstallChecks, check_installed


class FilledModule(NamedTuple):
    """Result of a load."""

    manifests: list[WeightManifest]
    """Manifests of the version's parts."""
    proof: WeightsProof


class BaseRequired(StructuredError):
    """A version must be pulled before it can be installed.

    Attributes:
        fault: ``delta`` for a version that rests on another, or ``tied`` for one that brings a
            tensor of the model under two names, which must be compared.
    """

    fault: Literal["delta", "tied"]
    texts: ClassVar = {
        "delta": "the version is a delta: pull it before it is installed",
        "tied": "the version brings a tensor under two names: pull it before it is installed",
    }


def load_version(  # noqa: PLR0913  # options of a load, each by its name
    store: ChunkStore,
    run_id: str,
    ready: StepReady,
    module: torch.nn.Module,
    selection: Selection | None = None,
    ahead: SpeculativeLoad | None = None,
    torn: PartialLoads | None = None,
    *,
    cast: bool = False,
    checks: InstallChecks = ALL_COMPARED,
) -> FilledModule:
    """Fill a module with the announced version; return the manifests of its parts, and the proof.

    Memory use is one chunk, and one tensor if the module's tensors are on a GPU or not row-major.
    The transport may use more for chunks in flight.

    Args:
        store: Where the version's parts are.
        run_id: The run.
        ready: The announcement.
        module: The module to fill.
        selection: Tensors to load, and the slice of each; only chunks that contain them are read.
        ahead: Bytes of the version that are in the module already, and the plan for the rest.
        torn: Tensors of the module that are not whole; updated here.
        cast: Allow another floating-point dtype in the module. Each such tensor takes memory for
            itself, in the version's dtype.
        checks: Checks of the filled module.

    Raises:
        BaseRequired: before any change, for a delta, and for a version that brings one tensor of
            the module under two names, which must be compared.
        VersionUnavailable: when the version is gone, before or during the load.
        IncompatibleWeights: before any change, when the version does not fit.
        CorruptVersion: when the stored bytes are not those announced; the module holds some.
    """
    with ExitStack() as exit_stack:
        parts = [
            open_part(
                store,
                exit_stack,
                PartRef(run_id, ready.epoch, ready.step, announced.rank),
                announced,
                harm="the model has some of it",
            )
            for announced in ready.parts
        ]
        # A delta needs the base that a load would overwrite; refused before any byte is written.
        if any(part.manifest.base is not None for part in parts):
            raise BaseRequired("delta")
        manifests = [part.manifest for part in parts]
        # Sources whose bytes are not in this process's memory, where speculative chunks cannot be
        # compared.
        elsewhere = (ZeroCopySource, TensorSource)
        in_memory = not any(isinstance(part.source, elsewhere) for part in parts)
        refs = [part.ref for part in parts]
        names = names_in(manifests) if selection is None else selection.keys()
        torn = torn or PartialLoads()
        # Speculative chunks were copied as bytes, which are not those of the module's dtype.
        if cast and ahead and is_cast(find_targets(module), manifests):
            ahead.forget()
        if (
            selection is None
            and in_memory
            and ahead
            and ahead.matches_prediction(refs, module, manifests)
        ):
            # Recorded before the first write: after a failure the module is known to be torn.
            with torn.until_whole(module, names):
                about_to_change(module)
                for part in parts:
                    _finish(part, ahead)
                proof = check_installed(module, manifests, checks=checks)
            return FilledModule(manifests, proof)
        targets = find_targets(module)
        plan = plan_copies(targets, manifests, selection, cast=cast)
        # Whether both names bring equal bytes is known only after a pull.
        if plan.twice:
            raise BaseRequired("tied")
        destinations = copy_targets(plan)
        with torn.until_whole(module, names):
            about_to_change(module)
            for part, copies in zip(parts, plan.parts, strict=True):
                _fill(part, copies, destinations)
            proof = check_installed(module, manifests, selection, cast=cast, checks=checks)
    return FilledModule(manifests, proof)


def _fill(part: OpenPart, plan: PartPlan, targets: dict[str, CopyTarget]) -> None:
    """Copy one part into the model."""
    sizes = part.sizes
    coming = by_chunk(sizes, plan, targets)
    if isinstance(part.source, ZeroCopySource):
        _receive(part, part.source, coming)
        return
    ranges = dict(coming)
    if isinstance(part.source, TensorSource):
        _copy(part, part.source, ranges)
        return

    # The source is in memory: each chunk is verified there, and copied while it is in the cache.
    def check_and_copy(index: int, data: memoryview | None, digested: str | None = None) -> None:
        # Verified first: the copy that follows finds the bytes in the cache.
        part.check(index, data, digested)
        assert data is not None
        begin = address(data)
        for run in ranges[index]:
            run.target.write(run.at, begin + run.begin, run.nbytes)

    part.source.read(sizes, check_and_copy, ranges)


def _copy(part: OpenPart, source: TensorSource, ranges: dict[int, list[ByteRange]]) -> None:
    """Copy a part that lies on a device into the model."""
    came = 0
    for index, data, digested in source.each(part.sizes, ranges):
        part.check_received(index, len(data), digested)
        for run in ranges[index]:
            run.target.copy(run.at, data[run.begin : run.begin + run.nbytes])
        came += 1
    # A damaged part ends early, without an error of its own.
    if came < len(ranges):
        raise CorruptPart(part.ref.rank, version=str(part.ref), fault="length")
    # The source may be unmapped once this returns.
    settle({run.target.device for runs in ranges.values() for run in runs})


def _finish(part: OpenPart, ahead: SpeculativeLoad) -> None:
    """Copy the chunks that were not in the model before the part was sealed."""
    written_count = ahead.written_count(part.ref)

    def check_and_copy(index: int, data: memoryview | None, digested: str | None = None) -> None:
        part.check(index, data, digested)
        assert data is not None
        if index >= written_count or digested != part.manifest.chunks[index].digest:
            ahead.write(part.ref, index, data)  # the chunk was written after it was digested

    assert not isinstance(part.source, TensorSource)
    part.source.read(part.sizes, check_and_copy, ahead.chunks(part.ref))


def _receive(
    part: OpenPart, source: ZeroCopySource, chunks: Iterator[tuple[int, list[ByteRange]]]
) -> None:
    """Receive a part from afar straight into the model."""
    sizes = part.sizes
    beside = memoryview(bytearray(max(sizes, default=0)))
    """Scratch memory for bytes that are not selected but belong to a digested chunk."""
    # Requests are pipelined: the chunks arrive in the order in which their ranges were yielded.
    coming: deque[list[ByteRange]] = deque()

    def rooms() -> Iterator[ChunkBuffers]:
        for index, ranges in chunks:
            coming.append(ranges)
            pieces, end = [], 0
            for run in ranges:
                # The kernel scatters the chunk: wanted bytes go into the model, others into the
                # scratch.
                pieces += [beside[end : run.begin], run.memory]
                end = run.begin + run.nbytes
            yield index, [*pieces, beside[end : sizes[index]]]

    with closing(source.receive(rooms())) as received:
        for chunk in received:
            part.check_received(chunk.number, chunk.length, chunk.digested, chunk.into)
            for run in coming.popleft():
                run.target.count_copied(run.nbytes)
