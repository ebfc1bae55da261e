"""Host memory for copies of tensors, so that the originals may change meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..copy_streams import CopyStream, get_copy_stream
from ..errors import FreedTensor
from ..tensors import copy_bytes, is_freed, is_plain

_ALIGNED = 64


class StagingMemory:
    """One reused piece of memory, which grows to the largest version.

    Memory is reused because the first touch of a page costs several times the copy into it. For
    tensors on a GPU the memory is pinned, and the copies are asynchronous.

    Args:
        lane: Stream that runs the copies; by default the device's own.
    """

    def __init__(self, lane: CopyStream | None = None) -> None:
        self._lane = lane
        self._under_way: list[tuple[CopyStream, Any]] = []
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layout: list[tuple[torch.dtype, torch.Size]] = []
        self._rooms: list[torch.Tensor] = []

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return row-major copies on the CPU, valid until the next call.

        Copies from a GPU are only begun, and are done after :meth:`settle`. Later work of the GPU
        is ordered after them, so that the tensors may be changed at once.
        """
        self.settle()  # running copies write into the memory that is reused
        layout = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if (
            layout != self._layout
        ):  # versions of one model have one layout, and new views cost more than copies
            self._rooms = self._laid_out(tensors)
            self._layout = layout
        lanes: dict[torch.device, CopyStream] = {}
        for room, tensor in zip(self._rooms, tensors, strict=True):
            if is_freed(tensor):
                raise FreedTensor()
            if self._lane is None and is_plain(tensor):
                copy_bytes(room.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            elif tensor.nbytes:
                if tensor.device not in lanes:
                    lanes[tensor.device] = self._lane or get_copy_stream(tensor.device)
                    lanes[tensor.device].begin()
                lanes[tensor.device].copy(room, tensor.detach())
        for lane in lanes.values():
            mark = lane.mark()
            lane.hold_back(mark)
            self._under_way.append((lane, mark))
        return self._rooms

    def settle(self) -> bool:
        """Wait until all copies are done; return True if any came from a GPU."""
        under_way, self._under_way = self._under_way, []
        for lane, mark in under_way:
            lane.wait(mark)
        return any(lane.pinned for lane, _ in under_way)

    def _laid_out(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
        if sum(sizes) > len(self._memory):
            # Release the old memory first: there are never two pieces.
            self._rooms, self._layout = [], []
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            pinned = any(tensor.is_cuda for tensor in tensors)
            self._memory = torch.empty(
                sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned
            )
        rooms, begin = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            rooms.append(self._room(tensor, begin))
            begin += size
        return rooms

    def _room(self, tensor: torch.Tensor, begin: int) -> torch.Tensor:
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        raw = self._memory[begin : begin + tensor.nbytes]
        return raw.view(tensor.dtype).view(tensor.shape)
