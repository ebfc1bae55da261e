"""Installing a pulled version in a model, in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from ..errors import IncompatibleWeights


class HasTensors(Protocol):
    """A version, or as much of it as tells whether it fits."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors."""
        ...


def check_fit(
    module: torch.nn.Module, version: HasTensors
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair every parameter with its tensor, before anything is changed.

    A parameter that shares memory with one that the version has (tied embeddings) needs no
    tensor of its own.

    Raises:
        IncompatibleWeights: when names, shapes or dtypes do not fit, naming the first.
    """
    targets: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    targets.update(_saved_buffers(module))
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    covered: set[int] = set()
    for name, tensor in version.tensors():
        target = targets.get(name)
        if target is None:
            raise IncompatibleWeights(f"the model has no {name!r}, which the version brings")
        if target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise IncompatibleWeights(
                f"{name!r} is {target.dtype} {list(target.shape)} in the model, "
                f"{tensor.dtype} {list(tensor.shape)} in the version"
            )
        covered.add(target.data_ptr())
        pairs.append((target, tensor))
    for name, target in targets.items():
        if target.numel() and target.data_ptr() not in covered:
            raise IncompatibleWeights(f"the version has no {name!r}, which the model needs")
    return pairs


def install(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy every tensor into its parameter."""
    with torch.no_grad():
        for target, tensor in pairs:
            target.copy_(tensor)


def _saved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}
