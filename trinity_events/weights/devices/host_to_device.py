"""Copy into the tensors of a GPU, through reused pinned memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..copy_streams import CopyStream, get_copy_stream
from ..tensors import FormCheck, copy_all, copy_bytes, flat_bytes, is_row_major
from .buckets import BUCKET_BYTES, Bucket, divide, is_gathered

SLOT_BYTES = BUCKET_BYTES
"""Bytes of one pinned slot, which holds a bucket, or pieces of large tensors."""
_ALIGNED = 64  # bytes of a cache line: unaligned copies take a fifth longer (decision 14)


class HostToDevice:
    """Double buffer in host memory: one slot is filled while the other is copied.

    Small tensors are copied in buckets, and scattered on the device. All copies are done after
    :meth:`finish`.

    Args:
        lane: Stream that runs the copies.
        slot_bytes: Size of a slot in bytes, a multiple of 64, and at least that of a small tensor.
    """

    def __init__(self, lane: CopyStream, slot_bytes: int = SLOT_BYTES) -> None:
        self._lane = lane
        self._slot_bytes = slot_bytes
        with torch.inference_mode(False):  # the slots outlive the caller's mode
            self._slots = [
                torch.empty(slot_bytes, dtype=torch.uint8, device="cpu", pin_memory=lane.pinned)
                for _ in range(2)
            ]
        self._sent = [lane.mark(), lane.mark()]
        self._now = self._filled = 0
        lane.begin()

    def begin(self) -> None:
        """Order the next copies after the work that was submitted to the device before."""
        self._lane.begin()

    def copy(self, target: torch.Tensor, source: int) -> None:
        """Copy the elements of a tensor from host memory.

        Args:
            target: Row-major tensor on the device.
            source: Address of its elements, row-major and of its dtype; they may change once this
                returns.
        """
        into = flat_bytes(target)
        done, whole = 0, target.nbytes
        while done < whole:
            if self._filled >= self._slot_bytes:
                self._turn()
            fits = min(whole - done, self._slot_bytes - self._filled)
            room = self._slots[self._now][self._filled : self._filled + fits]
            # Through pinned memory: from pageable memory the driver copies synchronously.
            copy_bytes(room.data_ptr(), source + done, fits)
            self._lane.copy(into[done : done + fits], room)
            done += fits
            self._filled += -(-fits // _ALIGNED) * _ALIGNED

    def scatter(
        self, buckets: Iterable[Bucket], targets: Sequence[torch.Tensor], sources: Sequence[int]
    ) -> None:
        """Copy into the small tensors of buckets.

        Args:
            buckets: Buckets of the targets, none larger than a slot.
            targets: Tensors on the device.
            sources: Address of the row-major elements of each; they may change on return.
        """
        previous: tuple[Bucket, Any] | None = None
        for bucket in buckets:
            if self._filled:
                self._turn()
            room = self._slots[self._now]
            copy_all(
                list(map(room.data_ptr().__add__, bucket.offsets)),
                sources[bucket.first : bucket.first + len(bucket.sizes)],
                bucket.sizes,
            )
            self._filled = bucket.end
            # After the scattering of the bucket that had this memory of the device before.
            self._lane.begin()
            self._lane.copy(bucket.memory, room[: bucket.end])
            # One bucket late: the host fills the next slot while the bus moves this one.
            if previous is not None:
                self._scatter(*previous, targets)
            previous = bucket, self._lane.mark()
        if previous is not None:
            self._scatter(*previous, targets)

    def finish(self) -> None:
        """Wait until all copies of the lane are done."""
        self._lane.wait(self._lane.mark())

    def _scatter(self, bucket: Bucket, mark: Any, targets: Sequence[torch.Tensor]) -> None:
        # On the host, as the scattering runs on another stream than the copy.
        self._lane.wait(mark)
        bucket.scatter(targets)

    def _turn(self) -> None:
        self._sent[self._now] = self._lane.mark()
        self._now = 1 - self._now
        # The GPU may still read the slot that is filled next.
        self._lane.wait(self._sent[self._now])
        self._filled = 0


class DeviceCopies:
    """Copies of bytes from the host into tensors of GPUs, planned once for a layout.

    Args:
        targets: Row-major tensors on GPUs; none is kept.
    """

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self._form = FormCheck(targets)
        self._by_device: dict[torch.device, tuple[list[int], list[int]]] = {}
        """Numbers of the small targets of each device, and of the others."""
        for number, target in enumerate(targets):
            small, large = self._by_device.setdefault(target.device, ([], []))
            (small if is_gathered(target) else large).append(number)
        self._buckets = {
            device: divide([targets[number] for number in small], SLOT_BYTES)
            for device, (small, _) in self._by_device.items()
        }

    def fits(self, targets: Sequence[torch.Tensor]) -> bool:
        """Return True if the plan is also that of these targets."""
        # By layout, not identity: versions bring new tensors, or views, of the same form.
        return self._form.fits(targets)

    def run(self, targets: Sequence[torch.Tensor], sources: Sequence[int]) -> None:
        """Copy from these addresses of the host. All copies are done on return."""
        for device, (small, large) in self._by_device.items():
            copier = _threads_own.get_copier(device)
            for number in large:
                copier.copy(targets[number], sources[number])
            copier.scatter(
                self._buckets[device],
                list(map(targets.__getitem__, small)),
                list(map(sources.__getitem__, small)),
            )
            copier.finish()
        # The pause that the log is told ends when all bytes are in the model.
        settle(self._by_device)


class _ThreadsOwn(threading.local):
    """Copiers of this thread, and its last plan: two installations at a time would mix slots."""

    def __init__(self) -> None:
        self._copiers: dict[torch.device, HostToDevice] = {}
        self._plan: DeviceCopies | None = None

    def get_copier(self, device: torch.device) -> HostToDevice:
        """Return the copier of a device, after the work that was submitted to the device."""
        if device not in self._copiers:
            self._copiers[device] = HostToDevice(get_copy_stream(device))
        self._copiers[device].begin()
        return self._copiers[device]

    def get_plan(self, targets: Sequence[torch.Tensor]) -> DeviceCopies:
        """Return the plan of these targets, which is the last one if their layout is its own."""
        if self._plan is None or not self._plan.fits(targets):
            self._plan = None  # its memory first: there are never two
            self._plan = DeviceCopies(targets)
        return self._plan


_threads_own = _ThreadsOwn()


def copy_pairs(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source into its target, on any devices. All copies are done on return."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    by_themselves: set[torch.device] = set()
    for target, source in pairs:
        if not target.nbytes:
            continue
        if _travels(target, source):
            targets.append(target)
            sources.append(source)
            continue
        target.detach().copy_(source)  # a tensor made in inference mode is written only so
        by_themselves.add(target.device)
    if targets:
        _threads_own.get_plan(targets).run(targets, list(map(torch.Tensor.data_ptr, sources)))
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
