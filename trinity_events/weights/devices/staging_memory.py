"""Host memory for copies of tensors, so that the originals may change meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..copy_streams import CopyStream, get_copy_stream
from ..errors import FreedTensor
from ..tensors import copy_bytes, is_freed, is_plain
from .buckets import BUCKET_BYTES, Bucket, GatheredCopies, divide, is_gathered

_ALIGNED = 64  # bytes of a cache line: unaligned copies take a fifth longer (decision 14)


class StagingMemory:
    """One reused piece of memory, which grows to the largest version.

    Memory is reused because the first touch of a page costs several times the copy into it. For
    tensors on a GPU the memory is pinned, and the copies are asynchronous; small tensors go in
    buckets, whose tensors lie next to one another.

    Args:
        lane: Stream that runs the copies; by default the device's own.
        bucket_bytes: Largest size of a bucket in bytes.
    """

    def __init__(self, lane: CopyStream | None = None, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._lane = lane
        self._bucket_bytes = bucket_bytes
        self._under_way: list[tuple[CopyStream, Any]] = []
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layout: list[tuple[torch.dtype, torch.Size, torch.device | None]] = []
        self._rooms: list[torch.Tensor] = []
        self._gathered: dict[torch.device, list[int]] = {}
        """Numbers of the tensors of each device that go in buckets."""
        self._apart: list[int] = []
        """Numbers of the others."""
        self._buckets: dict[torch.device, list[tuple[Bucket, torch.Tensor]]] = {}
        """Buckets of each device, and the host memory of each."""

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return row-major copies on the CPU, valid until the next call.

        Copies from a GPU are only begun, and are done after :meth:`settle`. Later work of the GPU
        is ordered after them, so that the tensors may be changed at once.
        """
        self.settle()  # running copies write into the memory that is reused
        if any(map(is_freed, tensors)):
            raise FreedTensor()
        layout = [
            (tensor.dtype, tensor.shape, self._get_bucket_device(tensor)) for tensor in tensors
        ]
        if layout != self._layout:
            # Versions of one model have one layout, and new views cost more than copies.
            self._lay_out(tensors)
            self._layout = layout
        lanes: dict[torch.device, CopyStream] = {}
        for device, numbers in self._gathered.items():
            lanes[device] = self._lane or get_copy_stream(device)
            small, copies = [tensors[number] for number in numbers], GatheredCopies(lanes[device])
            for bucket, room in self._buckets[device]:
                copies.copy(room, bucket, small)
        for number in self._apart:
            tensor, room = tensors[number], self._rooms[number]
            if self._lane is None and is_plain(tensor):
                copy_bytes(room.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            elif tensor.nbytes:
                if tensor.device not in lanes:
                    lanes[tensor.device] = self._lane or get_copy_stream(tensor.device)
                    lanes[tensor.device].begin()
                lanes[tensor.device].copy(room, tensor.detach())
        for lane in lanes.values():
            mark = lane.mark()
            # The next training step must not overwrite tensors that are still being copied.
            lane.hold_back(mark)
            self._under_way.append((lane, mark))
        return self._rooms

    def settle(self) -> bool:
        """Wait until all copies are done; return True if any came from a GPU."""
        # Taken first: after an error the same marks are not waited for again.
        under_way, self._under_way = self._under_way, []
        for lane, mark in under_way:
            lane.wait(mark)
        return any(lane.pinned for lane, _ in under_way)

    def _get_bucket_device(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the device on which the tensor is gathered; None if it is copied by itself."""
        on_device = self._lane is not None or not tensor.is_cpu
        return tensor.device if on_device and is_gathered(tensor) else None

    def _lay_out(self, tensors: Sequence[torch.Tensor]) -> None:
        # Release the old memory first: there are never two pieces.
        self._rooms, self._layout, self._buckets = [], [], {}
        self._gathered, self._apart = {}, []
        for number, tensor in enumerate(tensors):
            device = self._get_bucket_device(tensor)
            numbers = self._apart if device is None else self._gathered.setdefault(device, [])
            numbers.append(number)
        divided = {
            device: divide([tensors[number] for number in numbers], self._bucket_bytes)
            for device, numbers in self._gathered.items()
        }
        begins, end = [0] * len(tensors), 0
        places: list[tuple[torch.device, Bucket, int]] = []
        for device, buckets in divided.items():
            for bucket in buckets:
                places.append((device, bucket, end))
                for number, offset in enumerate(bucket.offsets, bucket.first):
                    begins[self._gathered[device][number]] = end + offset
                end += bucket.begin_of_next
        for number in self._apart:
            begins[number] = end
            end += tensors[number].nbytes + -tensors[number].nbytes % _ALIGNED
        if end > len(self._memory):
            # The old memory is freed first: pinned memory of two models may not fit.
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            pinned = any(tensor.is_cuda for tensor in tensors)
            self._memory = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._rooms = list(map(self._room, tensors, begins))
        for device, bucket, begin in places:
            room = self._memory[begin : begin + bucket.end]
            self._buckets.setdefault(device, []).append((bucket, room))

    def _room(self, tensor: torch.Tensor, begin: int) -> torch.Tensor:
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        raw = self._memory[begin : begin + tensor.nbytes]
        return raw.view(tensor.dtype).view(tensor.shape)
