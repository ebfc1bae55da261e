"""Counter of the changes of a model's weights, for copies of them."""

from __future__ import annotations

from typing import Any

import torch


class WeightChanges:
    """Number of changes of a model's weights: optimizer steps, and loads of any state.

    A copy of weights is current while the number is that of the time at which it was made. (Epoch,
    step) is no identity of weights: a load may bring others at the same step.

    Hooks of torch count, so that steps and loads count too that a user makes on the module or the
    optimizer. Both are collective, so that all ranks agree on whether a copy is current. Writes
    into a tensor are not counted.

    Args:
        module: The model.
        optimizer: Its optimizer.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._count = 0
        for part in module.modules():
            register: Any = part.register_load_state_dict_post_hook  # it has no annotations
            register(self._add)
        optimizer.register_step_post_hook(self._add)

    @property
    def count(self) -> int:
        """Number of changes so far."""
        return self._count

    def _add(self, *_: Any) -> None:
        self._count += 1
