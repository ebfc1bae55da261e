"""Whether a version's tensors fit those of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from ..errors import IncompatibleWeights
from .tensors import DTYPES


def targets_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a version fills, by all of their names: parameters, and saved buffers.

    Raises IncompatibleWeights when one is on the meta device: it has nothing to be filled.
    """
    targets: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    saved = module.state_dict(keep_vars=True) if buffers else {}
    targets |= {name: buffer for name, buffer in buffers.items() if name in saved}
    for name, target in targets.items():
        if target.is_meta:  # copies into it do nothing, and say nothing
            raise IncompatibleWeights(
                f"{name!r} has no memory in the model (meta device): materialize it first"
            )
    return targets


def misfit(
    name: str, target: torch.Tensor | None, dtype: str, shape: tuple[int, ...]
) -> IncompatibleWeights:
    """What is wrong with a tensor of the version, in words."""
    if target is None:
        return IncompatibleWeights(f"the model has no {name!r}, which the version brings")
    return IncompatibleWeights(
        f"{name!r} is {target.dtype} {list(target.shape)} in the model, "
        f"{DTYPES[dtype]} {list(shape)} in the version"
    )


def check_covered(targets: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
    """Raise IncompatibleWeights when the model needs what is not among these names, tied or not."""
    name = first_uncovered(targets, names, targets)
    if name is not None:
        raise IncompatibleWeights(f"the version has no {name!r}, which the model needs")


def first_uncovered(
    targets: Mapping[str, torch.Tensor], names: Collection[str], of: Collection[str]
) -> str | None:
    """The first ``of`` these that is not among the names, and is not tied to one of them.

    Tied is what has all of its memory in common, and not only where it begins.
    """
    covered: dict[int, int] = {}
    for name in names:
        begin = targets[name].data_ptr()
        covered[begin] = max(covered.get(begin, 0), targets[name].nbytes)
    for name, target in targets.items():
        if name in names or name not in of or not target.numel():
            continue
        if target.nbytes > covered.get(target.data_ptr(), 0):
            return name
    return None
