"""Memory that tensors are copied into, so that what they are of may change meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .tensors import copy_bytes, is_plain

_ALIGNED = 64


class Staging:
    """One piece of memory, used again and again; it grows to the largest that was asked for.

    The first touch of a page costs several times the copy into it. Where there is a GPU the memory
    is pinned, so that its own engine copies into it.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the CPU, row-major, until the next call: one copy of each, and no more."""
        sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
        if sum(sizes) > len(self._memory):
            # Let go of the old one first: there are never two.
            self._memory = torch.empty(0, dtype=torch.uint8)
            pinned = torch.cuda.is_available()
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        copies, begin = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            copies.append(self._copy(tensor, begin))
            begin += size
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return copies

    def _copy(self, tensor: torch.Tensor, begin: int) -> torch.Tensor:
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        room = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if is_plain(tensor):
            copy_bytes(room.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        else:
            room.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        return room
