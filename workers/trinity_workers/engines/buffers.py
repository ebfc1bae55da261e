"""Buffers that are part of a model's weights, such as the bias of a router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def saved_buffers(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a state dict, each once; FSDP keeps them complete on every rank."""
    seen: set[int] = set()
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            # Private: torch has no public way to ask which buffers a state dict has.
            if name not in submodule._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def all_buffer_names(module: Any) -> frozenset[str]:
    """Return all names of the buffers of a state dict; one that is shared has several."""
    return frozenset(name for name, _ in module.named_buffers(remove_duplicate=False))
