"""Copies between host memory and a GPU, concurrent with the GPU's computation.

A copy stream runs copies in order. Without a GPU each copy is synchronous, and all other code is
the same. On a GPU it is a CUDA stream of its own, so that computation goes on until it waits for
the copies. The host side of a copy is pinned there: a GPU copies asynchronously only to and from
pinned memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch

_SMALL = 64 << 10
"""Bytes below which a plain copy is faster than a copy on a stream and the wait for it."""


class CopyStream(Protocol):
    """Stream of copies. A mark stands for all copies begun before it."""

    pinned: bool
    """True if asynchronous copies need pinned host memory."""

    def begin(self) -> None:
        """Order the next copies after the work that was submitted to the device before."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy. Host memory must not change until a later mark was waited for."""
        ...

    def mark(self) -> Any:
        """Return a mark after the copies begun so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Wait until all copies before the mark are done."""
        ...

    def hold_back(self, mark: Any) -> None:
        """Order later work of the device after the mark."""
        ...


class HostCopyStream:
    """Synchronous :class:`CopyStream` for the host."""

    pinned = False

    def begin(self) -> None:
        """Do nothing: the host has computed everything."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def mark(self) -> None:
        """Do nothing: everything is copied."""

    def wait(self, mark: None) -> None:
        """Do nothing: everything is copied."""

    def hold_back(self, mark: None) -> None:
        """Do nothing: everything is copied."""


class CudaCopyStream:
    """Asynchronous :class:`CopyStream` of one GPU, beside its compute stream."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Order the next copies after the current stream."""
        # Without it the copy may read a tensor before the kernel that computes it has run.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy, and keep the allocator from reusing GPU memory until it is done."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                # The allocator knows the stream of a tensor's creation alone, and would reuse its
                # memory.
                tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """Record an event on the stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait for the event, and for no other work of the GPU."""
        # Not a synchronisation of the stream, which would wait for copies begun since.
        mark.synchronize()

    def hold_back(self, mark: torch.cuda.Event) -> None:
        """Make the current stream wait for the event; this process does not wait."""
        torch.cuda.current_stream(self._device).wait_event(mark)


def get_copy_stream(device: torch.device) -> CopyStream:
    """Return the copy stream of a device; each GPU has one in this process."""
    return _cuda_copy_stream(device) if device.type == "cuda" else HostCopyStream()


# One stream for each device: copies of different callers keep their order.
@lru_cache
def _cuda_copy_stream(device: torch.device) -> CudaCopyStream:
    return CudaCopyStream(device)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the CPU; large copies from a GPU go through pinned memory.

    Torch caches released pinned memory, and reuses it.
    """
    if not tensor.is_cuda or tensor.nbytes < _SMALL:
        return tensor.cpu()
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    lane = get_copy_stream(tensor.device)
    lane.begin()
    lane.copy(made, tensor)
    lane.wait(lane.mark())
    return made
