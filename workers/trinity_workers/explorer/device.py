"""Device on which an explorer serves the policy."""

from __future__ import annotations

import torch

from trinity_events.errors import TrinityError
from trinity_events.system.counts import format_count


class DeviceMissing(TrinityError):
    """An explorer is to serve the policy on a device that its process does not see.

    Attributes:
        device: The device.
        count: GPUs that torch sees.
        torch_version: Version of torch, which may be built without CUDA.
    """

    device: str
    count: int
    torch_version: str
    text = (
        "the explorer is to serve the policy on {device}, and torch {torch_version} sees {_gpus}: "
        "set explorer.device or --device to another device, set CUDA_VISIBLE_DEVICES, or install "
        "torch for CUDA"
    )

    @property
    def _gpus(self) -> str:
        return format_count(self.count, "GPU") if self.count else "no GPU"


def choose_device(device: str | None) -> str:
    """Make a device the current one, and return its name with its index.

    A collective group takes the current GPU of the thread that joins it.

    Args:
        device: The device; None takes the first GPU, else the CPU.

    Raises:
        DeviceMissing: if it is a GPU that this process does not see.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device is None and not count):
        return "cpu"
    # "cuda" without an index is the first GPU that CUDA_VISIBLE_DEVICES leaves to the process.
    index = int((device or "cuda").partition(":")[2] or 0)
    if index >= count:
        raise DeviceMissing(device or "cuda", count, torch.__version__)
    torch.cuda.set_device(index)
    return f"cuda:{index}"
