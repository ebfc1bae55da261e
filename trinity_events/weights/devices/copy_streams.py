"""Copies between the host's memory and a GPU's, beside what the GPU computes.

A lane takes copies, one after the other. Where there is no GPU a copy is done when it is begun, and
all else is the same code. On a GPU the lane is a stream of its own: what computes goes on, as far
as it does not wait for the copies itself. The host's side of a copy is pinned there, since the GPU
fetches from, and brings to, no other memory by itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch

_SMALL = 64 << 10
"""Bytes below which a copy costs less than what it takes to wait for one of a lane."""


class CopyStream(Protocol):
    """Takes copies. A mark stands for all that was begun before it was made."""

    pinned: bool
    """Whether the host's memory has to be pinned, for copies not to be waited for."""

    def begin(self) -> None:
        """Let the next copies see what the device was told to compute before."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy. The host's side stays as it is until a mark behind it was waited for."""
        ...

    def mark(self) -> Any:
        """A mark of what was begun so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Wait until all before the mark is copied."""
        ...

    def hold_back(self, mark: Any) -> None:
        """Let what the device is told to compute from now on come behind the mark."""
        ...


class HostCopyStream:
    """Implements :class:`CopyStream` where there is no GPU."""

    pinned = False

    def begin(self) -> None:
        """Everything is computed."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def mark(self) -> None:
        """Everything is copied."""

    def wait(self, mark: None) -> None:
        """Everything is copied."""

    def hold_back(self, mark: None) -> None:
        """Everything is copied."""


class CudaCopyStream:
    """Implements :class:`CopyStream`: a stream of one GPU, beside the one that computes."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Come behind the stream that is current."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy; memory of the GPU that is let go of meanwhile is not used again yet."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """An event on the stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait for the event, and for nothing else that the GPU does."""
        mark.synchronize()

    def hold_back(self, mark: torch.cuda.Event) -> None:
        """Let the stream that is current wait for the event; this process does not."""
        torch.cuda.current_stream(self._device).wait_event(mark)


def copy_stream_of(device: torch.device) -> CopyStream:
    """The lane of a device; one for all of its kind of copies, in this process."""
    return _cuda_copy_stream(device) if device.type == "cuda" else HostCopyStream()


@lru_cache
def _cuda_copy_stream(device: torch.device) -> CudaCopyStream:
    return CudaCopyStream(device)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; a copy when it is on a device, by pinned memory where that helps.

    Torch keeps pinned memory that was let go of, and gives it out again.
    """
    if not tensor.is_cuda or tensor.nbytes < _SMALL:
        return tensor.cpu()
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    lane = copy_stream_of(tensor.device)
    lane.begin()
    lane.copy(made, tensor)
    lane.wait(lane.mark())
    return made
