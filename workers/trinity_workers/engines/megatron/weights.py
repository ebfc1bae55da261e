"""Between Hugging Face's names and shapes and Megatron's: the port, and mbridge behind it.

The port knows of one tensor at a time and of no other rank: reading folders, gathering shards and
cutting them stay ours. mbridge moves to Megatron-Bridge, which can take its place here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .model import has_experts, padded_vocabulary


class WeightMapping(Protocol):
    """How one Megatron parameter relates to Hugging Face tensors.

    Names are Megatron's with the layer's and the expert's number in the whole model.
    """

    def huggingface_names(self, name: str) -> list[str]:
        """The Hugging Face tensors that the parameter is made of, in order."""
        ...

    def to_megatron(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole parameter, from whole tensors."""
        ...

    def to_huggingface(self, name: str, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The tensors that the whole parameter holds, by name; they may be views of it."""
        ...

    def split(
        self, name: str, whole: torch.Tensor, parameter: torch.nn.Parameter, parts: int
    ) -> Sequence[torch.Tensor]:
        """The shards of a parameter over so many tensor-parallel ranks."""
        ...

    def merge(self, name: str, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole parameter from its shards in rank order, which were cut along ``dim``."""
        ...


def mapping(hf: Any, config: Any, vocabulary_parts: int) -> WeightMapping:
    """The mapping of a model of this configuration.

    Args:
        hf: The Hugging Face configuration.
        config: megatron-core's TransformerConfig made of it.
        vocabulary_parts: Tensor-parallel ranks, which the vocabulary is padded for.
    """
    return _MBridge(hf, config, vocabulary_parts)


def local_mapping(hf: Any, config: Any, parts: int) -> WeightMapping:
    """The mapping of one tensor-parallel rank's shards: each becomes slices of whole tensors."""
    mine = copy.copy(hf)
    mine.num_attention_heads = hf.num_attention_heads // parts
    mine.num_key_value_heads = hf.num_key_value_heads // parts
    # Without it, it would be derived from the number of heads.
    mine.head_dim = config.kv_channels
    mine.vocab_size = padded_vocabulary(hf.vocab_size, parts) // parts
    return _MBridge(mine, config, 1)


class _MBridge:
    """mbridge's mapping for models of the local layer spec too.

    Its bridge is told our configuration: its own asks for Transformer Engine.
    """

    def __init__(self, hf: Any, config: Any, vocabulary_parts: int) -> None:
        from mbridge import models  # noqa: F401  # registers the bridges
        from mbridge.core.bridge import _MODEL_REGISTRY

        kind = _MODEL_REGISTRY[hf.model_type]
        direct = dict(kind._DIRECT_MAPPING)
        if hf.tie_word_embeddings:
            direct["output_layer.weight"] = direct["embedding.word_embeddings.weight"]

        class Bridge(kind):  # type: ignore[misc, valid-type]
            # A copy: mbridge would write a tied model's mapping into its class, for all to come.
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
        self._experts = has_experts(hf)

    def huggingface_names(self, name: str) -> list[str]:
        found: list[str] = self._bridge._weight_name_mapping_mcore_to_hf(self._known(name))
        return found

    def to_megatron(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        whole: torch.Tensor = self._bridge._weight_to_mcore_format(self._known(name), list(tensors))
        return whole

    def to_huggingface(self, name: str, whole: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return list(zip(*self._bridge._weight_to_hf_format(self._known(name), whole), strict=True))

    def split(
        self, name: str, whole: torch.Tensor, parameter: torch.nn.Parameter, parts: int
    ) -> Sequence[torch.Tensor]:
        shards: Sequence[torch.Tensor] = self._bridge._weight_split_across_tp(
            self._known(name), whole, parameter, parts
        )
        return shards

    def merge(self, name: str, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        known = self._known(name)
        if len(shards) == 1:
            return shards[0]
        if "linear_fc1" in known and "layer_norm" not in known:
            # Every shard has its part of the gate, then its part of the other.
            halves = [shard.chunk(2) for shard in shards]
            return torch.cat([half[part] for part in (0, 1) for half in halves])
        return torch.cat(list(shards), dim=dim)

    def _known(self, name: str) -> str:
        """The name that the fused layers have, which are what mbridge knows."""
        name = name.replace(
            ".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"
        )
        if not self._experts:
            name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
        return re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r".\2.weight\1", name)
