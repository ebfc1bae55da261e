"""Tensors that a worker's model is to compute with: a version's own, or adapters in their base."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trinity_events.weights import PulledVersion, TensorSlice
from trinity_events.weights.errors import AbsentTensor
from trinity_events.weights.reading.pull import join_pieces
from trinity_events.weights.slices import full_slice

from ...engines.model_folder import FolderReader
from ...learning.adapters import merged, weight_names


class PublishedWeights(Protocol):
    """Whole tensors of a model by name, of which a rank may need slices."""

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        ...

    def part(self, name: str, box: TensorSlice) -> Tensor:
        """Return a slice of a tensor."""
        ...


class VersionWeights:
    """Weights of a version that has all tensors of the model."""

    def __init__(self, version: PulledVersion) -> None:
        self._version = version
        self._pieces = version.by_name()

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._pieces.keys()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name, from the transport's own memory where it lies so."""
        return self._version.tensors()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        entry = self._pieces[name][0].entry
        return tuple(entry.global_shape or entry.shape)

    def part(self, name: str, box: TensorSlice) -> Tensor:
        """Return a slice of a tensor."""
        return join_pieces(name, self._pieces[name], box)


class MergedAdapters:
    """Weights of a base with the adapters of a version, merged as each tensor is asked for.

    Args:
        version: Version of adapters.
        base: Hugging Face folder of their base.
        scale: Factor of their products.
        dtype: Data type in which the base is served, which the sums have.

    Raises:
        AbsentTensor: The base has no weight for an adapter, or the version lacks its second matrix.
    """

    def __init__(
        self, version: PulledVersion, base: Path, scale: float, dtype: torch.dtype
    ) -> None:
        self._base, self._scale, self._dtype = FolderReader(base), scale, dtype
        self._adapters = dict(version.tensors())
        pairs = [weight_names(name) for name in self._base.names()]
        adapted = {name for pair in pairs if pair[0] in self._adapters for name in pair}
        # Either an adapter without a weight in the base, or one of its two matrices alone.
        for name in sorted(adapted ^ self._adapters.keys()):
            raise AbsentTensor(name, fault="version" if name in adapted else "model")

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors of the base."""
        return self._base.names()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of the base with its name, merged where it has an adapter."""
        for name in self._base.names():
            yield name, self._tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._base.tensor(name).shape)

    def part(self, name: str, box: TensorSlice) -> Tensor:
        """Return a slice of a tensor, of the same sum as the whole one."""
        tensor = self._tensor(name)
        return tensor[box.inside(full_slice(tuple(tensor.shape)))]

    def _tensor(self, name: str) -> Tensor:
        weight = self._base.tensor(name).to(self._dtype)
        first, second = weight_names(name)
        if first not in self._adapters:
            return weight
        return merged(weight, self._adapters[first], self._adapters[second], self._scale)
