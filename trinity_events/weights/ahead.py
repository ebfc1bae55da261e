"""Filling a model with a version that is still being published, by the layout of the last one.

Nobody vouches yet for what is written, and the manifest that says where it belongs comes last. So
it is brought to where the same bytes of the version before belonged. Once the version is announced
and its manifest says the same, all that is left is to compare digests; else it is loaded anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple
from weakref import ref

import torch

from trinity_schemas import WeightManifest

from .fitting import targets_of
from .landing import about_to_change, by_chunk, planned
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


class Ahead:
    """Where the bytes of the next version belong, as far as the last one tells; for one thread.

    Only for models on the CPU: what goes to a GPU is put together beside it first.
    """

    def __init__(self) -> None:
        self._layout: _Layout | None = None
        self._targets: dict[str, torch.Tensor] = {}
        """They keep the memory that is written to, should the module have another meanwhile."""
        self._plans: dict[tuple[int, int], dict[int, list[_Copy]]] = {}
        """By rank and bytes of a chunk: of each chunk what belongs where."""
        self._under_way: dict[PartRef, dict[int, list[_Copy]]] = {}

    def note(self, module: torch.nn.Module, manifests: Sequence[WeightManifest]) -> None:
        """A version was loaded, all of it: so the next one will lie, presumably."""
        if any(manifest.base is not None or manifest.subset for manifest in manifests):
            self._layout = None
        elif not self._is_of(module, manifests):
            self._layout, self._plans = _Layout(ref(module), manifests), {}

    def begin(self, module: torch.nn.Module) -> Taker | None:
        """What takes the next version as it comes; None when it is not known where it belongs."""
        self._under_way = {}
        layout = self._layout
        if layout is None or layout.module() is not module:
            return None
        targets = {name: target.detach() for name, target in targets_of(module).items()}
        if not all(map(is_plain, targets.values())):
            return None
        if _addresses(targets) != _addresses(self._targets):
            self._targets, self._plans = targets, {}
        about_to_change(module)
        return self._begin_part

    def abandon(self) -> None:
        """Count on nothing that was taken: the module may be changed by others."""
        self._under_way = {}

    def began(
        self,
        parts: Collection[PartRef],
        module: torch.nn.Module,
        manifests: Sequence[WeightManifest],
    ) -> bool:
        """Whether what was taken of these parts lies where it belongs by their manifests."""
        return self._under_way.keys() == set(parts) and self._is_of(module, manifests)

    def chunks(self, part: PartRef) -> Collection[int]:
        """Those with bytes that belong into the model."""
        return self._under_way[part].keys()

    def take(self, part: PartRef, index: int, data: memoryview) -> None:
        """Bring a chunk's bytes to where they belong."""
        begin = address(data)
        for target, source, nbytes in self._under_way[part].get(index, ()):
            copy_bytes(target, begin + source, nbytes)

    def _begin_part(self, part: PartRef, chunk_bytes: int) -> Take:
        self._under_way[part] = self._plan(part.rank, chunk_bytes)
        return lambda index, data: self.take(part, index, data)

    def _plan(self, rank: int, chunk_bytes: int) -> dict[int, list[_Copy]]:
        if (rank, chunk_bytes) not in self._plans:
            assert self._layout is not None
            module, manifests = self._layout.module(), self._layout.manifests
            assert module is not None
            found = planned(module, manifests, None)
            for manifest, plan in zip(manifests, found, strict=True):
                whole, rest = divmod(manifest.nbytes, chunk_bytes)
                copies = {
                    index: [_Copy(address(run.room), run.begin, run.nbytes) for run in runs]
                    for index, runs in by_chunk([chunk_bytes] * whole + [rest], plan)
                }
                self._plans[manifest.rank, chunk_bytes] = copies
        return self._plans[rank, chunk_bytes]

    def _is_of(self, module: torch.nn.Module, manifests: Sequence[WeightManifest]) -> bool:
        layout = self._layout
        return (
            layout is not None
            and layout.module() is module
            and [(one.rank, one.tensors) for one in layout.manifests]
            == [(one.rank, one.tensors) for one in manifests]
        )


def _addresses(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
