"""Filling a model with a version that is still being published, by the layout of the last one.

Nobody vouches yet for what is written, and the manifest that says where it belongs comes last. So
it is brought to where the same bytes of the version before belonged. Once the version is announced
and its manifest says the same, all that is left is to compare digests; else it is loaded anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple
from weakref import ref

import torch
from msgspec import Struct

from trinity_schemas import WeightManifest

from .compatibility import brought_twice, targets_of
from .copy_plan import about_to_change, by_chunk, plan_copies
from .pulled_version import names_in
from .tensors import address, copy_bytes, is_plain
from .transports.base import PartRef, Take, Taker


class _Copy(NamedTuple):
    """Bytes that lie together in a chunk, and in the model."""

    target: int
    source: int
    """From where the chunk begins."""
    nbytes: int


class _Layout(NamedTuple):
    module: ref[torch.nn.Module]
    manifests: Sequence[WeightManifest]


class _Filling(Struct):
    """A part that is brought to where it belongs."""

    plan: dict[int, list[_Copy]]
    """Of each chunk, what belongs where."""
    taken: int = 0
    """How many of its first chunks are there."""


class SpeculativeLoad:
    """Where the bytes of the next version belong, as far as the last one tells.

    For one thread, but for :meth:`bring`.

    Only for models on the CPU: what goes to a GPU is put together beside it first.
    """

    def __init__(self) -> None:
        self._layout: _Layout | None = None
        self._targets: dict[str, torch.Tensor] = {}
        """They keep the memory that is written to, should the module have another meanwhile."""
        self._plans: dict[int, dict[int, list[_Copy]]] = {}
        """By rank."""
        self._fillings: dict[PartRef, _Filling] = {}
        self._took = False

    def note(self, module: torch.nn.Module, manifests: Sequence[WeightManifest]) -> None:
        """A version was loaded, all of it: so the next one will lie, presumably."""
        if any(manifest.base is not None or manifest.subset for manifest in manifests):
            self._layout = None
        elif not self._is_of(module, manifests):
            # What is one tensor in the module, and two in the version, has to be compared.
            twice = brought_twice(targets_of(module), names_in(manifests))
            self._layout = None if twice else _Layout(ref(module), manifests)
            self._plans = {}

    def begin(self, module: torch.nn.Module) -> Taker | None:
        """What takes the next version as it comes; None when it is not known where it belongs."""
        self.abandon()
        self._took = False
        if self._layout is None or self._layout.module() is not module or not self._aim(module):
            return None
        about_to_change(module)
        return self._begin_part

    def forget(self) -> None:
        """Nothing is known of where the next version belongs: the last one was converted."""
        self.abandon()
        self._layout = None

    def abandon(self) -> None:
        """Count on nothing that was taken: the module may be changed by others."""
        self._fillings = {}

    @property
    def took(self) -> Collection[str]:
        """Tensors that may have something of what was taken since it began."""
        if not self._took or self._layout is None:
            return ()
        return names_in(self._layout.manifests)

    def leads(
        self, parts: Sequence[PartRef], module: torch.nn.Module, manifests: Sequence[WeightManifest]
    ) -> bool:
        """Whether parts with these manifests belong where it brings them, and has brought some."""
        if not self._is_of(module, manifests) or not self._aim(module):
            return False
        for part in parts:
            if part not in self._fillings:
                self._fillings[part] = _Filling(self._plan(part.rank))
        return True

    def chunks(self, part: PartRef) -> Collection[int]:
        """Those with bytes that belong into the model."""
        return self._fillings[part].plan.keys()

    def taken(self, part: PartRef) -> int:
        """How many of the part's first chunks are where they belong, whatever was in them."""
        return self._fillings[part].taken

    def take(self, part: PartRef, index: int, data: memoryview) -> None:
        """Bring the next chunk's bytes to where they belong, whatever is in them."""
        self._took = True
        self.bring(part, index, data)
        self._fillings[part].taken = index + 1

    def bring(self, part: PartRef, index: int, data: memoryview) -> None:
        """Bring a chunk's bytes to where they belong; several threads may."""
        begin = address(data)
        for target, source, nbytes in self._fillings[part].plan.get(index, ()):
            copy_bytes(target, begin + source, nbytes)

    def _begin_part(self, part: PartRef) -> Take:
        sizes = self._sizes(part.rank)
        self._fillings.pop(part, None)  # of an attempt that was given up
        if sizes:
            self._fillings[part] = _Filling(self._plan(part.rank))

        def take(index: int, data: memoryview) -> None:
            if part not in self._fillings:
                return  # it lies otherwise than the last one, or nobody knows how
            if index < len(sizes) and len(data) == sizes[index]:
                self.take(part, index, data)
            else:
                del self._fillings[part]

        return take

    def _aim(self, module: torch.nn.Module) -> bool:
        """Whether the module's tensors can be filled where they lie.

        Where they lie otherwise than before, plans are gone, and what was taken does not count.
        """
        targets = targets_of(module)
        if not all(map(is_plain, targets.values())):
            return False
        if not _lie_alike(targets, self._targets):
            self._targets = {name: target.detach() for name, target in targets.items()}
            self._plans, self._fillings = {}, {}
        return True

    def _plan(self, rank: int) -> dict[int, list[_Copy]]:
        if rank not in self._plans:
            assert self._layout is not None
            manifests = self._layout.manifests
            found = plan_copies(self._targets, manifests, None)
            for manifest, plan in zip(manifests, found, strict=True):
                self._plans[manifest.rank] = {
                    index: [_Copy(address(run.memory), run.begin, run.nbytes) for run in runs]
                    for index, runs in by_chunk(_sizes(manifest), plan)
                }
        return self._plans[rank]

    def _sizes(self, rank: int) -> list[int]:
        """Of the chunks that a rank's part has, presumably."""
        manifests = () if self._layout is None else self._layout.manifests
        return next((_sizes(manifest) for manifest in manifests if manifest.rank == rank), [])

    def _is_of(self, module: torch.nn.Module, manifests: Sequence[WeightManifest]) -> bool:
        layout = self._layout
        return (
            layout is not None
            and layout.module() is module
            and _laid_out(layout.manifests) == _laid_out(manifests)
        )


def _laid_out(manifests: Sequence[WeightManifest]) -> list[tuple[object, ...]]:
    return [(one.rank, one.base, one.subset, one.tensors, _sizes(one)) for one in manifests]


def _sizes(manifest: WeightManifest) -> list[int]:
    return [chunk.nbytes for chunk in manifest.chunks]


def _lie_alike(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Whether tensors of the same names lie in the same memory, as the same."""
    return some.keys() == others.keys() and all(
        one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype
        for one, other in ((one, others[name]) for name, one in some.items())
    )
