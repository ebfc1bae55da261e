"""DeepSeek-V3 and Moonlight: multi-latent attention, and experts that are chosen by sigmoid scores.

Left out are the layers that predict further tokens: a folder with their tensors is refused, since
nothing would read them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents, whatever ``rms_norm_eps`` is, as in transformers."""

_ROTARY = frozenset({"rope_type", "type", "rope_theta"})
_YARN = frozenset(
    {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    }
)


def is_deepseek(hf: Any) -> bool:
    """Return True if the configuration is of DeepSeek-V3's architecture."""
    return bool(hf.model_type == "deepseek_v3")


def find_unsupported(hf: Any) -> str | None:
    """Return a clause that names what megatron-core would build otherwise; None if nothing."""
    rope = {key: value for key, value in hf.rope_parameters.items() if value is not None}
    is_yarn = rope["rope_type"] == "yarn"
    unknown = sorted(rope.keys() - (_ROTARY | _YARN if is_yarn else _ROTARY))
    clauses = {
        f"the rotary setting {', '.join(unknown)}": bool(unknown),
        "mscale_all_dim without mscale": bool(rope.get("mscale_all_dim")) and "mscale" not in rope,
        "rotary dimensions that are not interleaved": not hf.rope_interleave,
        "quantised weights": bool(getattr(hf, "quantization_config", None)),
        "weights of experts that are not normalised over several": (
            not hf.norm_topk_prob or hf.num_experts_per_tok == 1
        ),
        # megatron-core weighs a group by its best (experts a token) // (groups a token).
        "groups of experts that are weighed by two, where each gives a token another number": (
            _has_limited_groups(hf) and hf.num_experts_per_tok // hf.topk_group != 2
        ),
    }
    return next((clause for clause, applies in clauses.items() if applies), None)


def latent_sizes(hf: Any) -> tuple[int, ...]:
    """Return the dimensions of what tensor-parallel ranks divide: latents of queries and keys."""
    return hf.q_lora_rank or 0, hf.kv_lora_rank + hf.qk_rope_head_dim


def attention_values(hf: Any) -> dict[str, Any]:
    """Return the values of megatron-core's MLATransformerConfig for attention."""
    rope = hf.rope_parameters
    values = {
        "multi_latent_attention": True,
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "rotary_base": rope["rope_theta"],
    }
    if rope["rope_type"] != "yarn":
        return values | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    original = rope["original_max_position_embeddings"]
    return values | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.get("factor") or hf.max_position_embeddings / original,
        "original_max_position_embeddings": original,
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        # transformers reads mscale only together with mscale_all_dim.
        "mscale": rope["mscale"] if rope.get("mscale_all_dim") else 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def expert_values(hf: Any) -> dict[str, Any]:
    """Return the values of megatron-core's configuration for the choice of experts."""
    dense = min(hf.first_k_dense_replace, hf.num_hidden_layers)
    groups = {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group}
    return {
        "moe_layer_freq": [0] * dense + [1] * (hf.num_hidden_layers - dense),
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts
        or None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # The loss depends on the reward alone, and explorers choose by the bias that was published.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        **(groups if _has_limited_groups(hf) else {}),
    }


@cache
def latent_attention() -> type:
    """Return the attention of plain layers; its base is megatron-core's, so it is made on demand.

    megatron-core divides the projection to latents of keys over tensor-parallel ranks, and gathers
    its output. Each rank's heads use the rotary part of it, whose gradient is never summed over
    the ranks (``multi_latent_attention.py``). Where the output is a part of the sequence,
    megatron-core gathers that by a function that sums the gradient.
    """
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        gather_from_tensor_model_parallel_region,
        scatter_to_sequence_parallel_region,
    )
    from megatron.core.transformer import multi_latent_attention as megatrons
    from megatron.core.transformer.spec_utils import ModuleSpec

    if not isinstance(megatrons.TELinear, type):
        # Without Transformer Engine the import succeeds, and brings mocks.
        megatrons.HAVE_TE = False

    def share_sequence(_: Any, __: Any, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
        # (S, B, latent / T) -> (S / T, B, latent)
        whole = gather_from_tensor_model_parallel_region(output[0])
        return scatter_to_sequence_parallel_region(whole), None

    class LocalLatentAttention(megatrons.MLASelfAttention):  # type: ignore[misc]
        def __init__(
            self, config: Any, submodules: Any, *args: Any, pg_collection: Any, **options: Any
        ) -> None:
            # megatron-core leaves out the group of this one, so that it would be the global one.
            query = ModuleSpec(ColumnParallelLinear, params={"tp_group": pg_collection.tp})
            submodules = replace(submodules, linear_q_proj=query)
            super().__init__(config, submodules, *args, pg_collection=pg_collection, **options)
            if config.sequence_parallel:
                self.linear_kv_down_proj.register_forward_hook(share_sequence)

    return LocalLatentAttention


def _has_limited_groups(hf: Any) -> bool:
    return bool(hf.n_group and hf.topk_group and hf.topk_group < hf.n_group)
