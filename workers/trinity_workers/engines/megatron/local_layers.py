"""Layers of plain torch for models without Transformer Engine.

megatron-core's own ones refuse sequence parallelism (the norm) and context parallelism (the
attention, which also keeps a weight for each pair of tokens), though torch allows both.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..context_parallel import causal_attention
from .deepseek import LATENT_EPSILON, latent_attention


class LocalNorm(torch.nn.RMSNorm):
    """RMSNorm whose tensor-parallel ranks may each have a part of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # finalize_model_grads() sums the gradients of such weights over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentNorm(LocalNorm):
    """RMSNorm of latents, whose epsilon is not that of the other norms."""

    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=LATENT_EPSILON)


class LocalAttention(torch.nn.Module):
    """Causal attention whose context-parallel ranks may each have a part of the sequence.

    It takes the arguments of megatron-core's ``DotProductAttention``.
    """

    def __init__(
        self,
        config: Any,
        *,
        pg_collection: Any,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self._group = pg_collection.cp
        self._scale = softmax_scale
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._sequence_parallel = config.sequence_parallel

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any
    ) -> Tensor:
        """Return the context [S / C, B, H * D] of queries [S / C, B, H, D]."""
        assert attention_mask is None, "padding is on the right: see training._Rows"
        dropout = self._dropout if self.training else 0.0
        with self._own_random_state() if dropout else nullcontext():
            attended = causal_attention(
                query, key, value, self._group, scale=self._scale, dropout=dropout
            )
        return attended.flatten(2).contiguous()

    def _own_random_state(self) -> Any:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        # As megatron-core's: each tensor-parallel rank has other heads. With sequence parallelism
        # the whole block of layers is in such a state already.
        return nullcontext() if self._sequence_parallel else get_cuda_rng_tracker().fork()


def use_local_layers(block: Any) -> None:
    """Put these layers into megatron-core's local specification of a block."""
    from megatron.core.transformer.identity_op import IdentityOp

    block.layer_norm = LocalNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = LocalNorm
        attention = parts.self_attention.submodules
        attention.core_attention = LocalAttention
        if hasattr(attention, "kv_layernorm"):
            parts.self_attention.module = latent_attention()
            attention.q_layernorm = attention.kv_layernorm = LatentNorm
            continue
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name) is not IdentityOp:
                setattr(attention, name, LocalNorm)
