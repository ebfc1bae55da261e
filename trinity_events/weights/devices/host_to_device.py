"""Copying into the tensors of a GPU, through pinned memory that is used again and again."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..tensors import copy_bytes, flat_bytes, is_row_major
from .copy_streams import CopyStream, copy_stream_of

SLOT_BYTES = 16 << 20
_ALIGNED = 64


class HostToDevice:
    """Two slots of the host's memory: one is filled while the other is on its way.

    What is copied is there after :meth:`finish`.

    Args:
        lane: Takes the copies.
        slot_bytes: Size of a slot, a multiple of 64.
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
        """Copy between tensors of one dtype and as many elements, row-major both.

        Args:
            target: On the device; it is changed.
            source: On the CPU; it is not needed any more when this returns.
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
        """Wait until everything is there."""
        self._lane.wait(self._lane.mark())

    def _turn(self) -> None:
        self._sent[self._now] = self._lane.mark()
        self._now = 1 - self._now
        self._lane.wait(self._sent[self._now])
        self._filled = 0


def copy_pairs(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source into its target, wherever the two are; all is there on return."""
    by_device: dict[torch.device, HostToDevice] = {}
    by_themselves: set[torch.device] = set()
    for target, source in pairs:
        if not target.nbytes:
            continue
        if not _travels(target, source):
            target.detach().copy_(source)  # of one made in inference mode that alone may be written
            by_themselves.add(target.device)
            continue
        if target.device not in by_device:
            by_device[target.device] = HostToDevice(copy_stream_of(target.device))
        by_device[target.device].copy(target, source)
    for one in by_device.values():
        one.finish()
    settle(by_themselves)


def settle(devices: Iterable[torch.device]) -> None:
    """Wait until all is there that this thread told these devices to copy."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _travels(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether bytes can go from the one to the other, from the host to a GPU."""
    return (
        target.is_cuda
        and source.is_cpu
        and target.dtype == source.dtype
        and target.shape == source.shape
        and is_row_major(target)
        and is_row_major(source)
    )
