"""Frames of one part in a collective group: a header, then a bucket of bytes.

The header is two int64: the kind of frame, and its number of bytes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from trinity_schemas.codec import MAX_MANIFEST_BYTES

from ....errors import GroupBroken
from .groups import ProcessGroup

MOST_BYTES = 256 << 20
"""Maximum bytes of a bucket that a receiver accepts."""
_SLOTS = 2


class FrameKind(IntEnum):
    """Kind of the next frame."""

    CHUNK = 1
    SEAL = 2
    ABORT = 3


class _Slot(NamedTuple):
    host: torch.Tensor
    works: list[Any]
    tensors: list[torch.Tensor]


class FrameSender:
    """Sender at rank 0, with two buckets: one is filled while the other is sent."""

    def __init__(self, group: ProcessGroup, chunk_bytes: int) -> None:
        self._group = group
        pinned = group.device.type == "cuda"
        size = min(chunk_bytes, MOST_BYTES)
        self._slots = [
            _Slot(torch.empty(size, dtype=torch.uint8, pin_memory=pinned), [], [])
            for _ in range(_SLOTS)
        ]
        self._next = 0

    def reserve(self) -> memoryview:
        """Return the bucket to fill next, once its former bytes are sent."""
        slot = self._slots[self._next]
        self._settle(slot)
        return slot.host.numpy().data

    def commit(self, nbytes: int) -> None:
        """Begin to send the first ``nbytes`` of the bucket."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        self._begin(slot, FrameKind.CHUNK, slot.host[:nbytes])

    def finish(self, frame: FrameKind, body: bytes = b"") -> None:
        """Send all pending frames and a last one, and wait until they are sent."""
        for slot in self._slots:
            self._settle(slot)
        last = self._slots[self._next]
        data = torch.from_numpy(np.frombuffer(body, np.uint8).copy()) if body else None
        self._begin(last, frame, data)
        self._settle(last)

    def _begin(self, slot: _Slot, frame: FrameKind, data: torch.Tensor | None) -> None:
        nbytes = 0 if data is None else data.numel()
        words = torch.tensor([frame, nbytes], dtype=torch.int64, device=self._group.device)  # (2,)
        slot.tensors.append(words)
        # Not waited for: collectives of one group run in the order in which they begin.
        slot.works.append(self._group.broadcast(words))
        if data is not None:
            # Pinned memory is not written before it is sent, so the copy needs no separate wait.
            sent = data.to(self._group.device, non_blocking=True)
            slot.tensors.append(sent)
            slot.works.append(self._group.broadcast(sent))

    def _settle(self, slot: _Slot) -> None:
        for work in slot.works:
            self._group.wait(work)
        slot.works.clear()
        # Only now: the group reads them until their work has ended.
        slot.tensors.clear()


class FrameReceiver:
    """Receiver at the other ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def next(self) -> tuple[FrameKind, int]:
        """Return kind and size of the next frame. Raises GroupBroken for an invalid frame."""
        words = torch.empty(2, dtype=torch.int64, device=self._group.device)  # (2,)
        self._group.wait(self._group.broadcast(words))
        kind, nbytes = words.tolist()
        # A damaged header must not have the receiver allocate any amount.
        most = MAX_MANIFEST_BYTES if kind == FrameKind.SEAL else MOST_BYTES
        if kind not in set(FrameKind) or not 0 <= nbytes <= most:
            raise GroupBroken("frame", reason=f"kind {kind} and {nbytes} bytes")
        return FrameKind(kind), nbytes

    def receive(self, into: torch.Tensor) -> None:
        """Receive a frame's bytes into uint8 [bytes] on the CPU."""
        if self._group.device.type == "cpu":
            self._group.wait(self._group.broadcast(into))
            return
        received = torch.empty_like(into, device=self._group.device)
        self._group.wait(self._group.broadcast(received))
        into.copy_(received)
