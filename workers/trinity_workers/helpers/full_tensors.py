"""Iteration over the full tensors of an FSDP model, of FSDP1 or FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from trinity_events.weights.compatibility import plain_name

from ..engines.base import NamedTensors, TrainEngine, per_tensor_params
from ..engines.buffers import saved_buffers


def full_tensors(engine: TrainEngine) -> NamedTensors:
    """Return the engine's full tensors by name. Collective: every rank must exhaust the iterator.

    FSDP1 keeps flat shards, and a unit's parameters exist only while it is summoned. They are
    summoned unit by unit, so that no rank holds more than the largest unit. Other engines gather
    their tensors themselves.
    """
    if isinstance(engine.module, torch.nn.Module) and FullyShardedDataParallel.fsdp_modules(
        engine.module
    ):
        return _summon(engine.module)
    return (
        (plain_name(name), tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in per_tensor_params(engine)
    )


def in_dtype(tensors: NamedTensors, dtype: torch.dtype) -> NamedTensors:
    """Yield tensors with those of floating point converted; every tensor is still gathered."""
    for name, tensor in tensors:
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def _summon(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    prefixes = {id(submodule): name for name, submodule in module.named_modules()}
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        # Nothing is changed, so nothing has to be written back into the shards.
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            for name, tensor in _once(_own_parameters(unit, prefixes[id(unit)])):
                # A copy: a view would keep FSDP's memory from being freed.
                yield name, tensor.clone()
    # a parameter outside of all units is complete on every rank
    if not isinstance(module, FullyShardedDataParallel):
        yield from _once(_own_parameters(module, ""))
    for name, buffer in saved_buffers(module):
        yield plain_name(name), buffer.detach()


def _once(
    named: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each of several tied tensors only once."""
    seen: set[int] = set()
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def _own_parameters(unit: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a unit, except those of nested units."""
    for name, tensor in unit.named_parameters(prefix, recurse=False):
        if not name.rpartition(".")[2].startswith("_flat_param"):
            yield plain_name(name), tensor
    for name, child in unit.named_children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _own_parameters(child, f"{prefix}.{name}" if prefix else name)
