"""Read of many tensors of a GPU in order: small ones in buckets, large ones by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..copy_streams import CopyStream
from ..tensors import flat_bytes
from .buckets import BUCKET_BYTES, Bucket, divide, is_gathered


class Run(NamedTuple):
    """Consecutive tensors that are copied at once."""

    first: int
    """Number of the first one."""
    bucket: Bucket | None
    """Bucket of small tensors; None for one large tensor."""


class _Begun(NamedTuple):
    """Copy that is under way."""

    first: int
    memory: torch.Tensor
    """Host memory that it fills."""
    offsets: list[int]
    mark: Any


class DeviceRuns:
    """Runs of tensors of one device, whose memory and views serve every version of a layout.

    Args:
        tensors: Row-major tensors of one device; none is kept.
        bucket_bytes: Largest size of a bucket.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
        small = [number for number, tensor in enumerate(tensors) if is_gathered(tensor)]
        # A large tensor ends a run: what is copied at once is consecutive in the part.
        starts = {
            place for place, number in enumerate(small) if place and small[place - 1] != number - 1
        }
        buckets = divide([tensors[number] for number in small], bucket_bytes, starts)
        alone = set(range(len(tensors))).difference(small)
        runs = [Run(number, None) for number in alone]
        runs += [Run(small[bucket.first], bucket) for bucket in buckets]
        self.runs = sorted(runs, key=lambda run: run.first)
        self._slot_bytes = max((bucket.end for bucket in buckets), default=0)
        self._slots: list[torch.Tensor] = []

    def read(
        self, tensors: Sequence[torch.Tensor], lane: CopyStream
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the number of the first tensor of each run, and the addresses of its tensors.

        Addresses are of host memory, and valid until the next run is asked for. The next run is
        copied meanwhile.
        """
        if not self._slots:
            with torch.inference_mode(False):
                self._slots = [
                    torch.empty(
                        self._slot_bytes, dtype=torch.uint8, device="cpu", pin_memory=lane.pinned
                    )
                    for _ in range(2)
                ]
        previous: _Begun | None = None
        for number, run in enumerate(self.runs):
            # The slot of the run before the last: its addresses ended with the last yield.
            begun = self._begin(run, tensors, lane, self._slots[number % 2])
            # Yielded only after the next copy is begun: the two overlap.
            if previous is not None:
                yield _finish(previous, lane)
            previous = begun
        if previous is not None:
            yield _finish(previous, lane)

    def _begin(
        self, run: Run, tensors: Sequence[torch.Tensor], lane: CopyStream, slot: torch.Tensor
    ) -> _Begun:
        if run.bucket is None:
            source, offsets = flat_bytes(tensors[run.first]), [0]
            # Torch caches released pinned memory, and reuses it.
            memory = torch.empty(
                len(source), dtype=torch.uint8, device="cpu", pin_memory=lane.pinned
            )
        else:
            # Its memory on the device is free: the run before the last was waited for.
            run.bucket.gather(tensors, run.first)
            source, offsets, memory = run.bucket.memory, run.bucket.offsets, slot
        # After the gathering, which runs on the device's own stream.
        lane.begin()
        if len(source):
            lane.copy(memory[: len(source)], source)
        return _Begun(run.first, memory, offsets, lane.mark())


def _finish(begun: _Begun, lane: CopyStream) -> tuple[int, list[int]]:
    lane.wait(begun.mark)
    return begun.first, list(map(begun.memory.data_ptr().__add__, begun.offsets))
