"""Layout of a part, made once for all versions with the same names, dtypes and shapes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

import torch

from trinity_schemas import ALIGNMENT, CheckedEntries, TensorEntry, encode_entries

from ...errors import TrinityError
from ..compatibility import plain_name
from ..slices import ShardOffset
from ..tensors import FormCheck, dtype_name, is_plain

_LONGEST_NAME, _MOST_DIMENSIONS = 256, 32
"""Characters and dimensions that the contract allows; readers refuse a part beyond them."""

Places: TypeAlias = Sequence[ShardOffset | None] | None
"""Offset of each shard, with None for a whole tensor; None if all tensors are whole."""


class UnpublishableTensor(TrinityError, TypeError):
    """Raised if a tensor cannot be published.

    Args:
        name: Name of the tensor.
        reason: What makes it so.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return (
            f"{self.name!r} cannot be published, since {self.reason}: leave it out, or publish "
            "another form of it"
        )


def tensor_entry(
    name: str, tensor: torch.Tensor, place: ShardOffset | None, end: int
) -> TensorEntry:
    """Return the entry of a tensor, or shard, that follows ``end`` bytes of the part.

    Its name is the plain one, without the prefixes of torch's wrappers.

    Raises UnpublishableTensor for a dtype outside the contract, and for a tensor without elements
    in memory, such as one that is sparse or on the meta device. Raises ValueError for a name, or a
    number of dimensions, outside the contract.
    """
    if tensor.layout is not torch.strided:
        raise UnpublishableTensor(name, f"its layout is {tensor.layout}")
    if tensor.is_meta:
        raise UnpublishableTensor(name, "it is on the meta device")
    try:
        dtype = dtype_name(tensor.dtype)
    except TypeError:
        raise UnpublishableTensor(name, f"its dtype is {tensor.dtype}") from None
    if not 0 < len(name) <= _LONGEST_NAME or tensor.dim() > _MOST_DIMENSIONS:
        raise ValueError(
            f"{name[:80]!r} of {tensor.dim()} dimensions cannot be published: a name has 1 to "
            f"{_LONGEST_NAME} characters, and a tensor at most {_MOST_DIMENSIONS} dimensions"
        )
    return TensorEntry(
        name=plain_name(name),
        dtype=dtype,
        shape=tuple(tensor.shape),
        offset=end + -end % ALIGNMENT,
        global_shape=None if place is None else place.global_shape,
        begins=None if place is None else place.begins,
    )


class PartLayout:
    """Entries of tensors that are published in full from host memory, and what follows from them.

    Args:
        names: Names of the tensors.
        tensors: The tensors, or shards; none is kept.
        places: Offsets of shards.

    Raises as :func:`tensor_entry`, and ValueError for a name that appears twice.
    """

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], places: Places
    ) -> None:
        entries, end = [], 0
        for name, tensor, place in zip(names, tensors, places or [None] * len(names), strict=True):
            entries.append(tensor_entry(name, tensor, place, end))
            end = entries[-1].offset + tensor.nbytes
        self.entries = CheckedEntries(entries, based=False)
        self.encoded = encode_entries(entries)
        self.offsets = [entry.offset for entry in entries]
        self.sizes = [tensor.nbytes for tensor in tensors]
        self.ends = list(map(operator.add, self.offsets, self.sizes))
        self.has_gaps = sum(self.sizes) < end
        self._names, self._places = list(names), places
        self._form = FormCheck(tensors)

    def fits(self, names: Sequence[str], tensors: Sequence[torch.Tensor], places: Places) -> bool:
        """Return True if these tensors have this layout, and lie row-major in host memory."""
        return names == self._names and places == self._places and self._form.fits(tensors)


class LastLayout:
    """Layout of the part that one rank published last."""

    def __init__(self) -> None:
        self._layout: PartLayout | None = None

    def of(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], places: Places
    ) -> PartLayout | None:
        """Return the layout of these tensors; None unless all lie row-major in host memory.

        Raises as :class:`PartLayout`.
        """
        if self._layout is None or not self._layout.fits(names, tensors, places):
            self._layout = None
            if all(map(is_plain, tensors)):
                self._layout = PartLayout(names, tensors, places)
        return self._layout
