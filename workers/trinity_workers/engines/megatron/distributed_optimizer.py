"""Distributed optimizer of megatron-core 0.16 whose state is saved and loaded as it is.

In its format ``fully_reshardable``, which any layout reads, three things are wrong
(``distrib_optimizer.py``). The first two concern torch's AdamW, which megatron-core takes where it
finds neither Transformer Engine nor Apex.

1. Saving and loading look for the step in the state, which AdamW lacks before its first step.
2. A load gives all parameters one tensor as their step, so that each further step counts once for
   every parameter. It also expects a step among the tensors of a parameter, where none is saved.
3. A save packs the buckets of a buffer without the padding between them, and then reads parameters
   by their places with it: moments of all buckets but the first are wrong (NVIDIA/Megatron-LM,
   pull request 5077). A tied embedding of a pipeline has a bucket by itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Only the first rank of a data-parallel group gathers the state, on the host, and writes it. By
# default all gather all of it.
FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
"""Format of the state: the only one of 0.16 that any layout can read."""


def make_resumable(optimizer: Any) -> None:
    """Mend the distributed parts of an optimizer that ``get_megatron_optimizer`` returned."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for part in optimizer.chained_optimizers:
        if type(part) is DistributedOptimizer:
            # megatron-core's function makes no other class, and reads global groups as it does.
            part.__class__ = _resumable_class()
            _detach_shards(part)


@cache
def _resumable_class() -> type:
    """Return the class; its base is megatron-core's, so it is defined on demand."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    class ResumableOptimizer(DistributedOptimizer):  # type: ignore[misc]
        @property
        def _is_torchs(self) -> bool:
            return type(self.optimizer) is torch.optim.AdamW

        def state_dict(self) -> dict[str, Any]:
            if not self._is_torchs:
                return dict(super().state_dict())
            _create_state(self.optimizer)
            if self.optimizer.state:
                return dict(super().state_dict())
            # A rank without parameters has no step. The first rank's plain values are saved.
            groups = self.optimizer.state_dict()["param_groups"]
            for group in groups:
                del group["params"]
                group["step"] = 0.0
            return {"optimizer": {"param_groups": groups}}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if self._is_torchs:
                _create_state(self.optimizer)
            super().load_state_dict(state_dict)
            if self._is_torchs:
                for state in self.optimizer.state.values():
                    state["step"] = state["step"].clone()

        def _set_main_param_and_optimizer_states(
            self, model_param: Any, tensors: dict[str, Tensor]
        ) -> None:
            if self._is_torchs:
                group, place = self.model_param_group_index_map[model_param]
                parameter = self.optimizer.param_groups[group]["params"][place]
                tensors = {**tensors, "step": self.optimizer.state[parameter]["step"]}
            super()._set_main_param_and_optimizer_states(model_param, tensors)

        def get_parameter_state_dp_zero(self, *args: Any, **options: Any) -> Any:
            state = super().get_parameter_state_dp_zero(*args, **options)
            if state is None:  # it is with the first rank of the group
                return None
            for index, buffer in enumerate(self.buffers):
                for tensors in state[index].values():
                    for key, packed in tensors.items():
                        if isinstance(packed, Tensor):
                            tensors[key] = _with_padding(packed, buffer.buckets)
            return state

        def sharded_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
            state: dict[str, Any] = super().sharded_state_dict(*args, **options)
            if state["param_state"] is None:
                # Else the plain values would name None as this rank's state.
                del state["param_state"]
            return state

    return ResumableOptimizer


def _detach_shards(optimizer: Any) -> None:
    """Detach the shards of float32 parameters from autograd's graph, before the first step.

    megatron-core makes them as differentiable views. Their graph keeps the accumulators of
    gradients, whose hooks keep the model, and Python's garbage collector cannot see that cycle.
    """
    groups = optimizer.optimizer.param_groups
    for group, shards in zip(groups, optimizer.shard_fp32_groups, strict=True):
        for index, shard in enumerate(shards):
            detached = shard.detach()
            # The norm of the gradients depends on attributes such as `tensor_model_parallel`.
            vars(detached).update(vars(shard))
            # These shards are the first parameters of their group.
            shards[index] = group["params"][index] = detached


def _with_padding(packed: Tensor, buckets: Any) -> Tensor:
    """Return a buffer's values with the padding after each bucket, from those without."""
    parts = torch.split(packed, [bucket.numel_unpadded for bucket in buckets])
    return torch.cat(
        [
            functional.pad(part, (0, bucket.grad_data.numel() - len(part)))
            for part, bucket in zip(parts, buckets, strict=True)
        ]
    )


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that AdamW makes in its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
