"""A double of what veRL's Megatron engine needs a GPU for; all other classes are the real ones.

Three things are doubled, each in a block of the calling thread:

1. functions and devices of ``torch.cuda`` are those of the CPU;
2. layers of Transformer Engine are megatron-core's own, and mbridge reads their names;
3. attention is causal whatever mask it gets, as Transformer Engine's is: veRL pads on the right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from trinity_workers.engines.megatron.cpu import adapted

CPU_OPTIONS = {
    "use_cpu_initialization": True,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "sequence_parallel": False,
}
"""Options of a TransformerConfig without CUDA kernels."""


@contextmanager
def gpu_double(*, layers: bool = True) -> Iterator[None]:
    """Let veRL's Megatron engine compute on the CPU in the block.

    Args:
        layers: If False, double ``torch.cuda`` alone.
    """
    from mbridge.core import llm_bridge
    from mbridge.core.bridge import Bridge
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    names = Bridge._weight_name_mapping_mcore_to_hf
    doubles: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_rng_state", get_state),
        (torch.cuda, "set_rng_state", set_state),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (megatron_random, "_get_cuda_rng_state", get_state),
        (megatron_random, "_set_cuda_rng_state", set_state),
    ]
    if layers:
        doubles += [
            (llm_bridge, "get_gpt_decoder_block_spec", _make_local_spec),
            (
                Bridge,
                "_weight_name_mapping_mcore_to_hf",
                lambda self, name: names(self, _rename_fused(name)),
            ),
        ]
    with ExitStack() as exits:
        exits.enter_context(adapted())
        for owner, name, instead in doubles:
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
