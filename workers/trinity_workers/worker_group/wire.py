"""Arguments and answers on their way between driver and ranks.

A tensor is pickled with all of the storage that it is a view of, byte by byte. As an array it takes
its own rows along alone, in buffers that Ray does not copy. Samples would be pickled object by
object; they travel as MessagePack, in which tokens are arrays and a group has its prompt once.
References to samples travel as they are: their ranks load the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from trinity_schemas import Experience, ExperienceReference, share_prompts

from .rows import is_groups
from .value_kinds import is_batch, is_tensor

if TYPE_CHECKING:
    from torch import Tensor


class _Packed(NamedTuple):
    """Tensor on its way."""

    array: np.ndarray[Any, Any]
    dtype: str


class _PackedGroups(NamedTuple):
    """Groups of samples on their way."""

    payload: bytes
    by_reference: list[bool]
    """True for each group of references."""


_groups = msgspec.msgpack.Decoder(list[msgspec.Raw])
_samples = msgspec.msgpack.Decoder(list[Experience])
_references = msgspec.msgpack.Decoder(list[ExperienceReference])


class _PackedBatch(NamedTuple):
    """Batch on its way."""

    fields: dict[str, _Packed]


def pack(value: Any) -> Any:
    """Return a value to send; tensors come back on the CPU."""
    if is_tensor(value):
        return _pack_tensor(value)
    if is_batch(value):
        return _PackedBatch({name: _pack_tensor(tensor) for name, tensor in value.known().items()})
    # Exactly dict: a subclass would come back as a plain one.
    if type(value) is dict:
        return {name: pack(item) for name, item in value.items()}
    if is_groups(value):
        by_reference = [isinstance(group[0], ExperienceReference) for group in value]
        rows = [
            group if refers else share_prompts(group)
            for group, refers in zip(value, by_reference, strict=True)
        ]
        return _PackedGroups(msgspec.msgpack.encode(rows), by_reference)
    return value


def unpack(value: Any) -> Any:
    """Return the value of which :func:`pack` made this; tensors have memory of their own."""
    if isinstance(value, _Packed):
        return _unpack_tensor(value)
    if isinstance(value, _PackedBatch):
        from ..algorithms.batch import Batch

        return Batch(**{name: _unpack_tensor(field) for name, field in value.fields.items()})
    if isinstance(value, _PackedGroups):
        rows = _groups.decode(value.payload)
        return [
            _references.decode(row) if refers else _with_prompts(_samples.decode(row))
            for row, refers in zip(rows, value.by_reference, strict=True)
        ]
    if type(value) is dict:
        return {name: unpack(item) for name, item in value.items()}
    return value


def _pack_tensor(tensor: Tensor) -> _Packed:
    import torch

    whole = tensor.detach().cpu().contiguous()
    # NumPy has no bfloat16.
    array = whole if whole.dtype != torch.bfloat16 else whole.view(torch.int16)
    return _Packed(array.numpy(), str(tensor.dtype).removeprefix("torch."))


def _unpack_tensor(packed: _Packed) -> Tensor:
    import torch

    # A copy: arrays in Ray's object store are read-only, and tensors are written to.
    return torch.from_numpy(packed.array.copy()).view(getattr(torch, packed.dtype))


def _with_prompts(group: list[Experience]) -> list[Experience]:
    return [sample.with_prompt_of(group[0]) for sample in group]
