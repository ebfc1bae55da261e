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
        self._layout: list[tuple[torch.dtype, torch.Size]] = []
        self._rooms: list[torch.Tensor] = []

    def copied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the CPU, row-major, until the next call: one copy of each, and no more."""
        layout = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if layout != self._layout:  # versions of one model are alike: views cost more than copies
            self._rooms = self._laid_out(tensors)
            self._layout = layout
        waits = False
        for room, tensor in zip(self._rooms, tensors, strict=True):
            if is_plain(tensor):
                copy_bytes(room.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            elif tensor.nbytes:
                room.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
                waits = waits or tensor.is_cuda
        if waits:
            torch.cuda.synchronize()
        return self._rooms

    def _laid_out(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
        if sum(sizes) > len(self._memory):
            # Let go of the old one first: there are never two.
            self._rooms, self._layout = [], []
            self._memory = torch.empty(0, dtype=torch.uint8)
            pinned = torch.cuda.is_available()
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        rooms, begin = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            rooms.append(self._room(tensor, begin))
            begin += size
        return rooms

    def _room(self, tensor: torch.Tensor, begin: int) -> torch.Tensor:
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        raw = self._memory[begin : begin + tensor.nbytes]
        return raw.view(tensor.dtype).view(tensor.shape)
