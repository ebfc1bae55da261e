"""A double of what veRL's Megatron engine needs a GPU for; all other classes are the real ones.

Five things are doubled, each in a block of the calling thread:

1. functions and devices of ``torch.cuda`` are those of the CPU;
2. layers of Transformer Engine are megatron-core's own, and mbridge reads their names;
3. attention is causal whatever mask it gets, as Transformer Engine's is: veRL pads on the right;
4. its Adam is torch's function, and counts steps in its groups, where megatron-core finds them;
5. what the engine asks of its machine is answered with yes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.adamw import adamw

from trinity_workers.engines.megatron.cpu import adapted

CPU_OPTIONS = {
    "use_cpu_initialization": True,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
}
"""Options of a TransformerConfig without CUDA kernels."""


class FusedAdam(torch.optim.Optimizer):
    """Adam with the state of Transformer Engine's (`pytorch/optimizers/fused_adam.py`)."""

    def __init__(self, params: Any, *, adam_w_mode: bool = True, **defaults: Any) -> None:
        assert adam_w_mode
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:  # an empty group counts no steps
                continue
            group["step"] = group.get("step", 0) + 1
            states = [self.state[parameter] for parameter in parameters]
            for parameter, state in zip(parameters, states, strict=True):
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
            beta1, beta2 = group["betas"]
            adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.tensor(group["step"] - 1.0) for _ in parameters],
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


@contextmanager
def gpu_double(*, layers: bool = True) -> Iterator[None]:
    """Let veRL's Megatron engine compute on the CPU in the block.

    Args:
        layers: If False, double ``torch.cuda`` alone.
    """
    with ExitStack() as exits:
        exits.enter_context(cuda_double())
        if layers:
            exits.enter_context(transformer_engine_double(CPU_OPTIONS))
        yield


@contextmanager
def cuda_double() -> Iterator[None]:
    """Let functions and devices of ``torch.cuda`` be those of the CPU in the block."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    with ExitStack() as exits:
        exits.enter_context(adapted())
        for owner, name, instead in (
            (torch.cuda, "get_rng_state", get_state),
            (torch.cuda, "set_rng_state", set_state),
            (torch.cuda, "manual_seed", torch.manual_seed),
            (megatron_random, "_get_cuda_rng_state", get_state),
            (megatron_random, "_set_cuda_rng_state", set_state),
        ):
            exits.enter_context(patch.object(owner, name, instead))
        yield


@contextmanager
def transformer_engine_double(options: dict[str, Any]) -> Iterator[None]:
    """Let megatron-core's own layers, and an Adam of torch, be Transformer Engine's in the block.

    Args:
        options: Options of a TransformerConfig, which these layers need.
    """
    from mbridge.core import llm_bridge
    from mbridge.core.bridge import Bridge
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from trinity_workers.engines.verl import megatron as engine

    names, set_extra = Bridge._weight_name_mapping_mcore_to_hf, Bridge.set_extra_args
    with ExitStack() as exits:
        for owner, name, instead in (
            (llm_bridge, "get_gpt_decoder_block_spec", _make_local_spec),
            (
                Bridge,
                "_weight_name_mapping_mcore_to_hf",
                lambda self, name: names(self, _rename_fused(name)),
            ),
            (Bridge, "set_extra_args", lambda self, **extra: set_extra(self, **options, **extra)),
            (optimizer, "Adam", FusedAdam),
            (optimizer, "USING_PYTORCH_OPTIMIZER", False),
            (distrib_optimizer, "Adam", FusedAdam),
            (distrib_optimizer, "HAVE_APEX_OR_TE", True),
            (distrib_optimizer, "USING_TE_OPTIMIZER", True),
            (engine, "check_device", lambda device: None),
        ):
            exits.enter_context(patch.object(owner, name, instead))
        yield


def _make_local_spec(config: Any, use_transformer_engine: bool, **options: Any) -> Any:
    """Return megatron-core's own layers in the place of Transformer Engine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class CausalAttention(DotProductAttention):  # type: ignore[misc]
        def forward(
            self, query: Any, key: Any, value: Any, mask: Any, *args: Any, **more: Any
        ) -> Any:
            return super().forward(query, key, value, None, *args, **more)

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **options)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def _rename_fused(name: str) -> str:
    """Return the name that a parameter has in fused layers, which mbridge knows."""
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    return name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
