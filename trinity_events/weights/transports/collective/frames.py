"""One part as it goes through a group: a few words before each bucket, then the bucket.

The words are two int64: what comes, and how many bytes of it.
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
"""The largest bucket that a receiver makes room for."""
_SLOTS = 2


class Frame(IntEnum):
    """What comes next."""

    CHUNK = 1
    SEAL = 2
    ABORT = 3


class _Slot(NamedTuple):
    host: torch.Tensor
    works: list[Any]
    held: list[torch.Tensor]


class FrameSender:
    """Rank 0's end: two buckets, so that one is filled while the other is on its way."""

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
        """The bucket to fill next, once what it held before is sent."""
        slot = self._slots[self._next]
        self._settle(slot)
        return slot.host.numpy().data

    def commit(self, nbytes: int) -> None:
        """Begin to send the first bytes of the bucket."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        self._begin(slot, Frame.CHUNK, slot.host[:nbytes])

    def finish(self, frame: Frame, body: bytes = b"") -> None:
        """Send all that is under way and the last frame, and wait until it is sent."""
        for slot in self._slots:
            self._settle(slot)
        last = self._slots[self._next]
        data = torch.from_numpy(np.frombuffer(body, np.uint8).copy()) if body else None
        self._begin(last, frame, data)
        self._settle(last)

    def _begin(self, slot: _Slot, frame: Frame, data: torch.Tensor | None) -> None:
        nbytes = 0 if data is None else data.numel()
        words = torch.tensor([frame, nbytes], dtype=torch.int64, device=self._group.device)
        slot.held.append(words)
        slot.works.append(self._group.broadcast(words))
        if data is not None:
            # Pinned, and not written again before it is sent: nobody waits for the copy alone.
            sent = data.to(self._group.device, non_blocking=True)
            slot.held.append(sent)
            slot.works.append(self._group.broadcast(sent))

    def _settle(self, slot: _Slot) -> None:
        for work in slot.works:
            self._group.wait(work)
        slot.works.clear()
        slot.held.clear()


class FrameReceiver:
    """The other ranks' end."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def next(self) -> tuple[Frame, int]:
        """What comes, and how many bytes of it. Raises GroupBroken for what cannot be."""
        words = torch.empty(2, dtype=torch.int64, device=self._group.device)
        self._group.wait(self._group.broadcast(words))
        kind, nbytes = words.tolist()
        most = MAX_MANIFEST_BYTES if kind == Frame.SEAL else MOST_BYTES
        if kind not in set(Frame) or not 0 <= nbytes <= most:
            raise GroupBroken(f"a frame of kind {kind} and {nbytes} bytes came: it is not ours")
        return Frame(kind), nbytes

    def take(self, into: torch.Tensor) -> None:
        """Receive a frame's bytes, into uint8 [bytes] on the CPU."""
        if self._group.device.type == "cpu":
            self._group.wait(self._group.broadcast(into))
            return
        received = torch.empty_like(into, device=self._group.device)
        self._group.wait(self._group.broadcast(received))
        into.copy_(received)
