"""Mapping between Hugging Face's and Megatron's names and shapes: a protocol, and mbridge's.

The protocol handles one tensor at a time, on one rank. Reading folders, gathering and cutting
shards are this project's. mbridge is becoming Megatron-Bridge, which can replace it here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ...learning.value_head import head_tensors
from .deepseek import is_deepseek
from .model import has_experts, padded_vocabulary

# Norms of local layers, by the names that they have where they are fused with the layer after them.
_NORMS = {".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight"}
_DENSE_NORMS = _NORMS | {".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight"}
_LATENT_NORMS = {
    f".self_attention.{latent}_layernorm.weight": (
        f".self_attention.linear_{latent}_up_proj.layer_norm_weight"
    )
    for latent in ("q", "kv")
}


class WeightMapping(Protocol):
    """Mapping between one Megatron parameter and Hugging Face tensors.

    Names are Megatron's, with layer and expert numbers of the whole model.
    """

    def huggingface_names(self, name: str) -> list[str]:
        """Return the names of the parameter's Hugging Face tensors, in order."""
        ...

    def to_megatron(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole parameter, from whole tensors."""
        ...

    def to_huggingface(self, name: str, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of the whole parameter by name; they may be views of it."""
        ...

    def split(
        self, name: str, whole: torch.Tensor, parameter: torch.Tensor, parts: int
    ) -> Sequence[torch.Tensor]:
        """Return the shards of a parameter over ``parts`` tensor-parallel ranks."""
        ...

    def merge(self, name: str, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the whole parameter from its shards along ``dim``, in rank order."""
        ...


def mapping(hf: Any, config: Any, vocabulary_parts: int) -> WeightMapping:
    """Return the mapping of a model of this configuration.

    Args:
        hf: Hugging Face configuration.
        config: TransformerConfig of megatron-core, made from it.
        vocabulary_parts: Tensor-parallel ranks, for which the vocabulary is padded.
    """
    return _made(hf, config, vocabulary_parts)


def local_mapping(hf: Any, config: Any, parts: int) -> WeightMapping:
    """Return the mapping of one tensor-parallel rank's shards to slices of whole tensors."""
    mine = copy.copy(hf)
    # mbridge splits fused queries, keys and values by these numbers: here by those of one rank.
    mine.num_attention_heads = hf.num_attention_heads // parts
    mine.num_key_value_heads = hf.num_key_value_heads // parts
    # Otherwise it is derived from the number of heads.
    mine.head_dim = config.kv_channels
    mine.vocab_size = padded_vocabulary(hf.vocab_size, parts) // parts
    return _made(mine, config, 1)


def _made(hf: Any, config: Any, vocabulary_parts: int) -> WeightMapping:
    kind = _WithValueHead if head_tensors(hf) else _MBridge
    return kind(hf, config, vocabulary_parts)


class _MBridge:
    """Mapping of mbridge, extended to models of the local layer spec.

    mbridge's own configuration requires Transformer Engine, so its bridge gets this one.
    """

    def __init__(self, hf: Any, config: Any, vocabulary_parts: int) -> None:
        from mbridge import models  # noqa: F401  # registers the bridges
        from mbridge.core.bridge import _MODEL_REGISTRY

        # Private, as all that is used of mbridge here: its version is pinned (decision 13).
        kind = _MODEL_REGISTRY[hf.model_type]
        direct = dict(kind._DIRECT_MAPPING)
        if hf.tie_word_embeddings:
            direct["output_layer.weight"] = direct["embedding.word_embeddings.weight"]

        class Bridge(kind):  # type: ignore[misc, valid-type]
            # A copy: mbridge writes a tied model's mapping into the class, for all later models.
            _DIRECT_MAPPING = direct

            def _build_config(self) -> Any:
                return config

            def _adjust_mapping_for_shared_weights(self) -> None:
                return

        self._bridge: Any = Bridge(
            hf, dtype=config.params_dtype, make_vocab_size_divisible_by=vocabulary_parts
        )
        self._bridge.vocab_size = hf.vocab_size
        self._bridge.padded_vocab_size = padded_vocabulary(hf.vocab_size, vocabulary_parts)
        self._norms = _NORMS if has_experts(hf) else _DENSE_NORMS
        if is_deepseek(hf):
            self._norms = _LATENT_NORMS

    def huggingface_names(self, name: str) -> list[str]:
        names: list[str] = self._bridge._weight_name_mapping_mcore_to_hf(self._known(name))
        return names

    def to_megatron(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        whole: torch.Tensor = self._bridge._weight_to_mcore_format(self._known(name), list(tensors))
        return whole

    def to_huggingface(self, name: str, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return list(zip(*self._bridge._weight_to_hf_format(self._known(name), whole), strict=True))

    def split(
        self, name: str, whole: torch.Tensor, parameter: torch.Tensor, parts: int
    ) -> Sequence[torch.Tensor]:
        shards: Sequence[torch.Tensor] = self._bridge._weight_split_across_tp(
            self._known(name), whole, parameter, parts
        )
        return shards

    def merge(self, name: str, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        fused_name = self._known(name)
        if len(shards) == 1:
            return shards[0]
        if "linear_fc1" in fused_name and "layer_norm" not in fused_name:
            # Every shard has its part of the gate, then its part of the up projection.
            halves = [shard.chunk(2) for shard in shards]
            return torch.cat([half[part] for part in (0, 1) for half in halves])
        return torch.cat(list(shards), dim=dim)

    def _known(self, name: str) -> str:
        """Return the name that the parameter has in fused layers, which mbridge knows."""
        for local, fused in self._norms.items():
            name = name.replace(local, fused)
        return re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r".\2.weight\1", name)


class _WithValueHead(_MBridge):
    """Mapping of a model with a head of one output, which has no vocabulary to pad or split."""

    def huggingface_names(self, name: str) -> list[str]:
        if not name.startswith("output_layer."):
            return super().huggingface_names(name)
        return [name.replace("output_layer.", "score.")]

    def to_megatron(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if not name.startswith("output_layer."):
            return super().to_megatron(name, tensors)
        [head] = tensors
        return head

    def to_huggingface(self, name: str, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if not name.startswith("output_layer."):
            return super().to_huggingface(name, whole)
        [hf_name] = self.huggingface_names(name)
        return [(hf_name, whole)]
