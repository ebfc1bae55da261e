"""CPU as a platform of veRL's, which from 0.9 on knows accelerators alone.

``VERL_USE_EXTERNAL_MODULES`` names this module and ``VERL_PLATFORM`` is ``cpu``: so every process
that imports veRL has it, Ray's workers too. Releases before need none.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

try:
    from verl.plugin.platform import PlatformBase, PlatformRegistry
except ModuleNotFoundError:
    PlatformBase = None

_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_platform_available": True,
    "current_device": "cpu",
    "device_count": 1,
    "communication_backend_name": "gloo",
    "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
    "ray_resource_name": "CPU",
    "ray_noset_envvars": [],
    "get_device_capability": (None, None),
    "is_ipc_supported": False,
    "nvtx_range": nullcontext(),
}
_PROPERTIES: dict[str, Any] = {
    "device_name": "cpu",
    "vendor_name": "any",
    "device_module": torch.cpu,
}


def _answering(name: str) -> Any:
    if name in _PROPERTIES:
        return property(lambda _: _PROPERTIES[name])
    return lambda *_, **__: _ANSWERS.get(name)


if PlatformBase is not None:
    # Every abstract member: what a later release adds is None here, and no missing method.
    _members = PlatformBase.__abstractmethods__ | _ANSWERS.keys()
    PlatformRegistry.register("cpu")(
        type("CpuPlatform", (PlatformBase,), {name: _answering(name) for name in _members})
    )

# What veRL's checkpoints ask of any device's module.
for _name in ("get_rng_state", "set_rng_state"):
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, getattr(torch, _name))
for _name in ("empty_cache", "memory_allocated", "memory_reserved"):
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, lambda *_: 0)
