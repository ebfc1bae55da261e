"""Fill an idle model with a version that is still being published, by the last version's layout.

The bytes are not verified yet, and the manifest with their layout comes last. Each chunk is
therefore written to where the same chunk of the version before belonged. Once the version is
announced with the same layout, only the digests are left to compare; else it is loaded again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple
from weakref import ref

import torch
from msgspec import Struct

from trinity_schemas import WeightManifest

from ..compatibility import ModuleFingerprint, distinct, find_duplicates, find_targets
from ..reading.pull import names_in
from ..tensors import address, copy_bytes, is_plain
from ..transports.base import OnChunk, OnPart, PartRef
from .copy_plan import plan_copies
from .copy_target import about_to_change, by_chunk, copy_targets


class _Copy(NamedTuple):
    """Copy of bytes that are contiguous in a chunk and in the model."""

    target: int
    source: int
    """Offset in the chunk, in bytes."""
    nbytes: int


class _Layout(NamedTuple):
    module: ref[torch.nn.Module]
    manifests: Sequence[WeightManifest]


class _Filling(Struct):
    """A part whose chunks are being written into the model."""

    plan: dict[int, list[_Copy]]
    """Copies of each chunk, by its number."""
    written_count: int = 0
    """Number of the part's first chunks that were written."""


class SpeculativeLoad:
    """Predicted layout of the next version in a model, and the chunks written by it.

    Not thread-safe, except :meth:`write`. For models on the CPU only: the load of a model on a GPU
    assembles its tensors in host memory first.
    """

    def __init__(self) -> None:
        self._layout: _Layout | None = None
        self._targets: dict[str, torch.Tensor] = {}
        """Keep the memory alive that is written to, in case the module replaces its tensors."""
        self._memory: ModuleFingerprint | None = None
        self._plans: dict[int, dict[int, list[_Copy]]] = {}
        """Copies of each chunk, by rank."""
        self._fillings: dict[PartRef, _Filling] = {}
        self._has_written = False

    def record(self, module: torch.nn.Module, manifests: Sequence[WeightManifest]) -> None:
        """Remember the layout of a full version that was loaded, as a prediction for the next."""
        if any(manifest.base is not None or manifest.subset for manifest in manifests):
            self._layout = None
        # The usual case keeps the plans: the layout of versions seldom changes.
        elif not self._has_layout(module, manifests):
            # One tensor of the module under two names of the version has to be compared.
            twice = find_duplicates(find_targets(module), names_in(manifests))
            self._layout = None if twice else _Layout(ref(module), manifests)
            self._plans = {}

    def begin(self, module: torch.nn.Module) -> OnPart | None:
        """Return a callback that writes incoming chunks into the module; None without a layout."""
        self.abandon()
        self._has_written = False
        if (
            self._layout is None
            or self._layout.module() is not module
            or not self._prepare_targets(module)
        ):
            return None
        # The chunks that follow are copied by address, past autograd.
        about_to_change(module)
        return self._begin_part

    def forget(self) -> None:
        """Drop the layout, because the last version was converted to other dtypes."""
        self.abandon()
        self._layout = None

    def abandon(self) -> None:
        """Disregard the chunks written so far, because other code may change the module."""
        self._fillings = {}

    @property
    def written_names(self) -> Collection[str]:
        """Names of the tensors that chunks written since :meth:`begin` may have changed."""
        if not self._has_written or self._layout is None:
            return ()
        return names_in(self._layout.manifests)

    def matches_prediction(
        self, parts: Sequence[PartRef], module: torch.nn.Module, manifests: Sequence[WeightManifest]
    ) -> bool:
        """Return True if these manifests have the predicted layout, and prepare their parts."""
        if not self._has_layout(module, manifests) or not self._prepare_targets(module):
            return False
        for part in parts:
            if part not in self._fillings:
                self._fillings[part] = _Filling(self._plan(part.rank))
        return True

    def chunks(self, part: PartRef) -> Collection[int]:
        """Return the numbers of the chunks that the model needs."""
        return self._fillings[part].plan.keys()

    def written_count(self, part: PartRef) -> int:
        """Return the number of the part's first chunks that were written, unverified."""
        return self._fillings[part].written_count

    def write_next(self, part: PartRef, index: int, data: memoryview) -> None:
        """Write the next chunk into the model, unverified."""
        self._has_written = True
        self.write(part, index, data)
        # After the copy, so that a chunk that failed midway is copied again.
        self._fillings[part].written_count = index + 1

    def write(self, part: PartRef, index: int, data: memoryview) -> None:
        """Copy a chunk into the model. Thread-safe."""
        begin = address(data)
        for target, source, nbytes in self._fillings[part].plan.get(index, ()):
            copy_bytes(target, begin + source, nbytes)

    def _begin_part(self, part: PartRef) -> OnChunk:
        sizes = self._sizes(part.rank)
        self._fillings.pop(part, None)  # from an abandoned attempt
        if sizes:
            self._fillings[part] = _Filling(self._plan(part.rank))

        def write_chunk(index: int, data: memoryview) -> None:
            if part not in self._fillings:
                return  # the layout is unknown, or differs from the last one
            if index < len(sizes) and len(data) == sizes[index]:
                self.write_next(part, index, data)
            else:
                # Other sizes than predicted: the version is loaded as if nothing was written.
                del self._fillings[part]

        return write_chunk

    def _prepare_targets(self, module: torch.nn.Module) -> bool:
        """Return True if the module's tensors can be filled in place.

        If their memory has changed, the plans and the chunks written so far are dropped.
        """
        if self._memory is not None and self._memory.find_unchanged(module) is not None:
            return True
        targets = find_targets(module)
        # Bytes are written by address, which needs row-major host memory.
        if not all(map(is_plain, targets.values())):
            return False
        if not _same_storage(targets, self._targets):
            self._targets = {name: target.detach() for name, target in targets.items()}
            self._plans, self._fillings = {}, {}
        # Compared before each use: a write to freed memory would corrupt the process.
        self._memory = ModuleFingerprint(module, distinct(targets.values()))
        return True

    def _plan(self, rank: int) -> dict[int, list[_Copy]]:
        if rank not in self._plans:
            assert self._layout is not None
            manifests = self._layout.manifests
            plan = plan_copies(self._targets, manifests, None)
            targets = copy_targets(plan)
            for manifest, copies in zip(manifests, plan.parts, strict=True):
                self._plans[manifest.rank] = {
                    index: [_Copy(address(run.memory), run.begin, run.nbytes) for run in runs]
                    for index, runs in by_chunk(_sizes(manifest), copies, targets)
                }
        return self._plans[rank]

    def _sizes(self, rank: int) -> list[int]:
        """Return the predicted sizes of the chunks of a rank's part."""
        manifests = () if self._layout is None else self._layout.manifests
        return next((_sizes(manifest) for manifest in manifests if manifest.rank == rank), [])

    def _has_layout(self, module: torch.nn.Module, manifests: Sequence[WeightManifest]) -> bool:
        layout = self._layout
        return (
            layout is not None
            and layout.module() is module
            and _laid_out(layout.manifests) == _laid_out(manifests)
        )


def _laid_out(manifests: Sequence[WeightManifest]) -> list[tuple[object, ...]]:
    return [
        (manifest.rank, manifest.base, manifest.subset, manifest.tensors, _sizes(manifest))
        for manifest in manifests
    ]


def _sizes(manifest: WeightManifest) -> list[int]:
    return [chunk.nbytes for chunk in manifest.chunks]


def _same_storage(targets: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Return True if both have the same names, with the same memory, shapes and dtypes."""
    return targets.keys() == others.keys() and all(
        tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and tensor.dtype == other.dtype
        for tensor, other in ((tensor, others[name]) for name, tensor in targets.items())
    )
