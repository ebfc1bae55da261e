"""Conversion of tensors to bytes and back, bit for bit."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.lib.stride_tricks import as_strided
from typing_extensions import Buffer

from .copy_streams import on_host
from .errors import UnpublishableDtype

# Exact types: a subclass may wrap its elements, and its address mean nothing.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.complex64,
    )
}
_FEWEST_ROWS = 16
"""Copies of one size from which arrays of rows take less time than a call for each."""
_LONGEST_ROW = 64 << 10
"""Bytes of a copy above which the call costs less than the extra copy of a gather."""
_PACKED = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
"""Floating-point dtypes of quantised weights alone, which torch cannot convert to others: powers of
two that scale blocks, and two numbers in a byte."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in a manifest.

    Raises UnpublishableDtype for a dtype outside the contract.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise UnpublishableDtype(str(dtype), "tensor")
    return name


def is_castable(dtype: torch.dtype) -> bool:
    """Return True for a dtype that is converted where another floating-point dtype is asked for."""
    return dtype.is_floating_point and dtype not in _PACKED


def sent_dtype(dtype: torch.dtype, chosen: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which tensors are published, if ``chosen`` is the one for floats."""
    return chosen if chosen is not None and is_castable(dtype) else dtype


def is_freed(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has elements but no memory, as an offloading engine leaves it.

    Return False for subclasses, which may keep their elements anywhere.
    """
    return type(tensor) in _PLAIN and not tensor.data_ptr() and tensor.numel() > 0


def is_row_major(tensor: torch.Tensor) -> bool:
    """Return True if the elements are row-major from the tensor's address, on any device.

    Return False for subclasses, which may keep their elements anywhere.
    """
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the elements are row-major in host memory."""
    return tensor.is_cpu and is_row_major(tensor)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it, such that :func:`is_plain` holds.

    A DTensor is gathered, which is a collective.
    """
    return tensor if is_plain(tensor) else on_host(as_dense(tensor))


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor row-major on its device; a DTensor is gathered as in :func:`as_plain`."""
    # By name: importing DTensor loads torch.distributed.
    gather = getattr(tensor, "full_tensor", None)
    if gather is not None:
        tensor = gather()
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().as_subclass(torch.Tensor)
    if type(dense) is torch.Tensor:
        return dense
    # A wrapper has no elements at its address, which is 0; only its own copy reads them.
    return torch.empty(dense.shape, dtype=dense.dtype, device=dense.device).copy_(dense)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the row-major elements; a copy only if :func:`as_plain` makes one."""
    return flat_bytes(as_plain(tensor)).numpy().data


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a row-major tensor's own memory, uint8 [bytes], on any device."""
    flat = tensor.detach().reshape(-1)
    if flat.stride() != (1,):  # a single element may have any stride
        flat = flat.as_strided(flat.shape, (1,))
    # view() refuses tensors without elements.
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def address(memory: memoryview) -> int:
    """Return the address of the first byte; 0 for empty memory."""
    if not len(memory):
        return 0
    if memory.readonly:
        return int(np.frombuffer(memory, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # a tenth of the time of numpy


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy between two addresses, with the GIL released."""
    # ctypes releases the GIL for a call of a foreign function.
    ctypes.memmove(target, source, nbytes)


def copy_all(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy between many addresses; small copies of one size take one operation for all of them.

    Sources and targets must not overlap. A call of ``memmove`` from Python takes 1.5 us, ten times
    as long as the 2 KiB of a small tensor.
    """
    copies = np.array((targets, sources, sizes), np.int64)  # (3, copies)
    if not len(sizes):
        return
    if copies[2].min() != copies[2].max():
        copies = copies[:, np.argsort(copies[2], kind="stable")]
    ends = [*(np.flatnonzero(np.diff(copies[2])) + 1).tolist(), len(sizes)]
    for begin, end in zip([0, *ends], ends, strict=False):
        of_size, nbytes = copies[:2, begin:end], int(copies[2, begin])
        if end - begin >= _FEWEST_ROWS and 0 < nbytes <= _LONGEST_ROW:
            (into, places), (out, origins) = (_rows(column, nbytes) for column in of_size)
            into[places] = out[origins]
        else:
            deque(map(ctypes.memmove, *of_size.tolist(), repeat(nbytes)), maxlen=0)


def _rows(addresses: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray | slice]:
    """Return an array with rows of bytes at these addresses, and the numbers of these rows in it.

    The array reaches from the first address to the last, in steps that all of them have in common.
    Its other rows overlap these, or may be no memory at all: they are never touched.
    """
    first = int(addresses.min())
    offsets = addresses - first
    # Zero for rows at one address, which may be read many times.
    step = int(np.gcd.reduce(offsets)) or nbytes
    memory = memoryview((ctypes.c_ubyte * nbytes).from_address(first))
    row = np.frombuffer(memory, np.dtype((np.void, nbytes)))
    rows = as_strided(row, (int(offsets.max()) // step + 1,), (step,))
    numbers = offsets // step
    # Rows that follow one another, as in a part, are moved without a copy between.
    is_run = len(rows) == len(numbers) and bool((np.diff(numbers) == 1).all())
    return rows, slice(None) if is_run else numbers


def clear_bytes(target: int, nbytes: int) -> None:
    """Set the bytes at an address to zero."""
    ctypes.memset(target, 0, nbytes)


def as_buffer(memory: memoryview) -> torch.Tensor:
    """Return memory as a tensor, uint8 [bytes], which keeps it alive. Nothing is copied."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    array = np.frombuffer(memory, np.uint8)
    if array.flags.writeable:
        return torch.from_numpy(array)
    # Torch has no read-only tensors, and warns about read-only memory.
    borrowed = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    borrowed.owner = array  # type: ignore[attr-defined]
    return torch.frombuffer(borrowed, dtype=torch.uint8)


class FormCheck:
    """Check that tensors have the classes, devices, dtypes, shapes and strides of earlier ones.

    The check is one call of torch, by which compiled code recognises its arguments. In a release of
    torch without it, nothing fits. No tensor may come twice.

    Args:
        tensors: The earlier tensors; none is kept.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._count = len(tensors)
        self._guards: Any = None
        # The mode of the caller would change what torch compares.
        with torch.inference_mode(False), suppress(ImportError):
            # Private API of torch, which has no public form of this check.
            from torch._C._dynamo.guards import TensorGuards

            sized = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
            self._guards = TensorGuards(*tensors, **sized)

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if these tensors equal the earlier ones in all but memory and elements."""
        if self._guards is None or len(tensors) != self._count:
            return False
        with torch.inference_mode(False):
            return bool(self._guards.check(*tensors))


def digest(data: Buffer, *more: Buffer) -> str:
    """Return the XXH3 digest of 128 bits: it detects accidents, at the speed of memory.

    Several pieces are digested as one.
    """
    if not more:
        # One call for one piece, without a state: most chunks are one piece.
        return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"
    pieces = Digesting()
    for piece in (data, *more):
        pieces.update(piece)
    return pieces.digest()


class Digesting:
    """Incremental digest of pieces; fastest while each piece is still in the cache."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self.update = self._state.update

    def digest(self) -> str:
        """Return the digest of all pieces so far."""
        return f"xxh3:{self._state.hexdigest()}"
