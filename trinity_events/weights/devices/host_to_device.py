"""Copy into the tensors of a GPU, through reused pinned memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..copy_streams import CopyStream, get_copy_stream
from ..tensors import copy_bytes, flat_bytes, is_row_major

SLOT_BYTES = 16 << 20
"""Bytes of one pinned slot."""
_ALIGNED = 64


class HostToDevice:
    """Double buffer in host memory: one slot is filled while the other is copied.

    All copies are done after :meth:`finish`.

    Args:
        lane: Stream that runs the copies.
        slot_bytes: Size of a slot in bytes, a multiple of 64.
    """

    def __init__(self, lane: CopyStream, slot_bytes: int = SLOT_BYTES) -> None:
        self._lane = lane
        self._slot_bytes = slot_bytes
        self._slots = [
            torch.empty(slot_bytes, dtype=torch.uint8, device="cpu", pin_memory=lane.pinned)
            for _ in range(2)
        ]
        self._sent = [lane.mark(), lane.mark()]
        self._now = self._filled = 0
        lane.begin()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between row-major tensors of one dtype and equal size.

        Args:
            target: Tensor on the device.
            source: Tensor on the CPU; it may change once this returns.
        """
        into, begin = flat_bytes(target), source.data_ptr()
        done, whole = 0, target.nbytes
        while done < whole:
            if self._filled >= self._slot_bytes:
                self._turn()
            fits = min(whole - done, self._slot_bytes - self._filled)
            room = self._slots[self._now][self._filled : self._filled + fits]
            copy_bytes(room.data_ptr(), begin + done, fits)
            self._lane.copy(into[done : done + fits], room)
            done += fits
            self._filled += -(-fits // _ALIGNED) * _ALIGNED

    def finish(self) -> None:
        """Wait until all copies are done."""
        self._lane.wait(self._lane.mark())

    def _turn(self) -> None:
        self._sent[self._now] = self._lane.mark()
        self._now = 1 - self._now
        self._lane.wait(self._sent[self._now])
        self._filled = 0


def copy_pairs(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source into its target, on any devices. All copies are done on return."""
    by_device: dict[torch.device, HostToDevice] = {}
    by_themselves: set[torch.device] = set()
    for target, source in pairs:
        if not target.nbytes:
            continue
        if not _travels(target, source):
            target.detach().copy_(source)  # a tensor made in inference mode is written only so
            by_themselves.add(target.device)
            continue
        if target.device not in by_device:
            by_device[target.device] = HostToDevice(get_copy_stream(target.device))
        by_device[target.device].copy(target, source)
    for copier in by_device.values():
        copier.finish()
    settle(by_themselves)


def settle(devices: Iterable[torch.device]) -> None:
    """Wait for the copies that this thread submitted to these devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _travels(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return True if the pair is a plain copy of bytes from the host to a GPU."""
    return (
        target.is_cuda
        and source.is_cpu
        and target.dtype == source.dtype
        and target.shape == source.shape
        and is_row_major(target)
        and is_row_major(source)
    )
