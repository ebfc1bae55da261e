"""Estimate of the memory of each rank and explorer, before anything of a run is started.

It counts what docs/memory.md names: the state of the models, gathered layers, activations, logits
and keys and values. It leaves out what no setting decides: the CUDA context, communication buffers
and fragmentation, together one to three GiB of a GPU.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..config.train_config import TrainConfig

_GIB = 1 << 30
_MASTER = 16
"""Bytes of a trained parameter: value, gradient and both moments of AdamW, each in float32."""
_FROZEN = 4
"""Bytes of a parameter that is not trained, in float32."""
_LORA_SHARE = 0.01
"""Share of the parameters that adapters of a usual rank have."""
_LAYER_ACTIVATIONS = 24
"""Bytes of activations per token, layer and unit of the hidden size, in two-byte numbers, that
tensor-parallel ranks divide (Korthikanti and others, arXiv 2205.05198, section 4.2)."""
_SHARED_ACTIVATIONS = 10
"""Those around the norms, which all of them have where they do not divide the sequence too."""
_LOGIT_COPIES = 3
"""Logits in float32 at once: the head's, their softmax and its gradient."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelShape(Struct, frozen=True, kw_only=True):
    """Sizes of a model, as its ``config.json`` names them."""

    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    key_values: int
    """Numbers that one token adds to the cache of one layer."""

    @classmethod
    def read(cls, folder: Path, parameters: int) -> ModelShape | None:
        """Read the sizes of a Hugging Face folder; None where it does not name them."""
        try:
            config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
            # A model of text and images has those of the text in a part of its own.
            config = config.get("text_config", config)
            heads = config["num_attention_heads"]
            width = config.get("head_dim") or config["hidden_size"] // heads
            return cls(
                parameters=parameters,
                hidden=config["hidden_size"],
                layers=config["num_hidden_layers"],
                vocabulary=config["vocab_size"],
                key_values=2 * width * (config.get("num_key_value_heads") or heads),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """Bytes of one process, by what takes them."""

    process: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Return the bytes of all parts."""
        return sum(self.parts.values())

    def format(self) -> str:
        """Return the estimate as one line."""
        # Of a small model, in MiB: tenths of a GiB would all be zero.
        unit, name = (_GIB, "GiB") if self.total >= _GIB else (1 << 20, "MiB")
        parts = ", ".join(f"{what} {size / unit:.1f}" for what, size in self.parts.items() if size)
        return f"{self.process}: about {self.total / unit:.1f} {name} ({parts})"


def estimate_rank(config: TrainConfig, shape: ModelShape) -> MemoryEstimate:
    """Return the memory of a trainer rank while it takes a step."""
    trainer, rollouts = config.trainer, config.rollouts
    ranks, tensor = trainer.rank_count, trainer.tensor_ranks
    width = _BYTES[config.model.dtype]
    if trainer.on_megatron:
        split = tensor * trainer.pipeline_parallel
        replicas = max(1, ranks // split)
        # Parameters are held whole by each replica; the optimizer's part only where it is shared.
        optimizer = 12 / (replicas if trainer.distributed_optimizer else 1)
        state, gathered = shape.parameters * (optimizer + width + 4) / split, 0.0
    else:
        split, replicas = 1, max(1, ranks // tensor)
        trained = _LORA_SHARE if config.model.lora.rank else 1.0
        bytes_each = trained * _MASTER + (1 - trained) * width
        state = shape.parameters * bytes_each / ranks
        # One layer computes while the next one is gathered, a rank's part of each.
        layer = shape.parameters / max(1, shape.layers) / tensor
        gathered = 2 * layer * width if replicas > 1 else 0.0
    share = split if split > 1 else ranks
    if config.algorithm.kl.coefficient and not config.model.lora.rank:
        state += shape.parameters * _FROZEN / share
    if config.algorithm.critic.use:
        state += shape.parameters * _MASTER / share
    rows = max(1, rollouts.prompts_per_step * rollouts.samples_per_prompt // replicas)
    rows = min(rows, trainer.micro_batch_rows or rows)
    length = rollouts.max_new_tokens * rollouts.max_turns + (rollouts.max_prompt_tokens or 0)
    tokens = rows * length
    if trainer.micro_batch_tokens is not None:
        tokens = min(tokens, max(length, trainer.micro_batch_tokens))
    layers = shape.layers / (trainer.pipeline_parallel if split > 1 else 1)
    norms = tensor if trainer.sequence_parallel else 1
    each = _LAYER_ACTIVATIONS / tensor + _SHARED_ACTIVATIONS / norms
    of_layer = tokens * shape.hidden * each * width / 2
    # With recomputation a layer stores its input alone, and one layer at a time all of it.
    activations = (
        tokens * shape.hidden * width * layers / norms + of_layer
        if trainer.recompute
        else of_layer * layers
    )
    # FSDP's ranks gather them.
    sharing = tensor if trainer.on_megatron else 1
    logits = tokens * shape.vocabulary * 4 * _LOGIT_COPIES / sharing
    # The copy that generates stays through the step; Megatron's has memory in generation alone.
    has_copy = trainer.colocated and not trainer.on_megatron and not _serves_by_vllm(config)
    parts = {
        "state": state,
        "served weights": shape.parameters * width if has_copy else 0.0,
        "gathered layers": gathered,
        "activations": activations,
        "logits": 0.0 if trainer.fused_loss else logits,
    }
    return MemoryEstimate(
        process="rank", parts={name: math.ceil(size) for name, size in parts.items()}
    )


def estimate_loading(config: TrainConfig, shape: ModelShape) -> MemoryEstimate:
    """Return the memory of a rank of FSDP while it loads the last of its models."""
    algorithm, has_adapters = config.algorithm, bool(config.model.lora.rank)
    loaded = algorithm.critic.use + (bool(algorithm.kl.coefficient) and not has_adapters)
    # The base of adapters stays as it is; other models become float32 before they are divided.
    width = _BYTES[config.model.dtype] if has_adapters else _FROZEN
    return MemoryEstimate(
        process="rank that loads",
        # A rank keeps its part of a model once it has all of it (decision 53).
        parts={
            "whole model": shape.parameters * width,
            "state": math.ceil(loaded * shape.parameters * _FROZEN / config.trainer.rank_count),
        },
    )


def estimate_generation(config: TrainConfig, shape: ModelShape) -> MemoryEstimate:
    """Return the memory of a trainer rank while the ranks answer one claim together."""
    trainer, width = config.trainer, _BYTES[config.model.dtype]
    # FSDP's ranks have the whole policy each.
    tensor = 1
    if trainer.on_megatron:
        tensor = 1 if trainer.expert_parallel > 1 else trainer.tensor_ranks
        tensor = trainer.rollout_tensor_parallel or tensor
    parts = {"state": estimate_rank(config, shape).parts["state"]}
    if not _serves_by_vllm(config):
        parts["served weights"] = math.ceil(shape.parameters * width / tensor)
        # Replicas share the rows of a claim, and their ranks the heads.
        cache = _count_cache_bytes(config, shape, width)
        parts["keys and values"] = math.ceil(cache / trainer.rank_count)
    return MemoryEstimate(process="rank that generates", parts=parts)


def estimate_explorer(config: TrainConfig, shape: ModelShape) -> MemoryEstimate:
    """Return the memory of an explorer that answers one claim."""
    width = _BYTES[config.explorer.dtype or config.model.dtype]
    return MemoryEstimate(
        process="explorer",
        # A version is verified beside the served one, and installed from there.
        parts={
            "served weights": shape.parameters * width,
            "next version": shape.parameters * width,
            "keys and values": _count_cache_bytes(config, shape, width),
        },
    )


def _count_cache_bytes(config: TrainConfig, shape: ModelShape, width: int) -> int:
    """Return the bytes of keys and values of one claim's answers."""
    rollouts = config.rollouts
    # Deterministic engines generate each prompt's answers by themselves.
    groups = 1 if config.explorer.deterministic else config.groups_per_claim
    length = rollouts.max_new_tokens * rollouts.max_turns + (rollouts.max_prompt_tokens or 0)
    tokens = rollouts.samples_per_prompt * groups * length
    return tokens * shape.layers * shape.key_values * width


def _serves_by_vllm(config: TrainConfig) -> bool:
    return config.explorer.engine == "vllm"


def format_estimates(config: TrainConfig, folder: Path, parameters: int) -> list[str]:
    """Return lines about the memory of a run's processes, and about what the devices have.

    Returns:
        No lines for a model whose sizes are not known.
    """
    shape = ModelShape.read(folder, parameters)
    if shape is None or not parameters:
        return []
    ranks, rank = config.trainer.rank_count, estimate_rank(config, shape)
    lines = [f"memory of each of {ranks} ranks, {rank.format()}"]
    phases = [rank]
    loading = estimate_loading(config, shape)
    if config.trainer.engine == "fsdp" and loading.total > rank.total:
        lines.append(f"memory of each {loading.format()}")
        phases.append(loading)
    served = (
        "; vLLM takes the share gpu_memory_utilization of its GPU for weights, keys and values"
        if _serves_by_vllm(config)
        else ""
    )
    if config.trainer.colocated:
        generating = estimate_generation(config, shape)
        lines.append(f"memory of each {generating.format()}{served}")
        phases.append(generating)
    # A rank does one thing at a time.
    counts = [(max(phases, key=lambda estimate: estimate.total), ranks)]
    if not config.trainer.colocated:
        explorer = estimate_explorer(config, shape)
        lines.append(f"memory of each of {config.explorers} explorers, {explorer.format()}{served}")
        counts.append((explorer, config.explorers))
    return [*lines, *_format_devices(counts)]


def _format_devices(counts: Sequence[tuple[MemoryEstimate, int]]) -> list[str]:
    devices = _device_bytes()
    if devices:
        least = min(devices)
        has = f"this host has {len(devices)} GPUs of {least / _GIB:.1f} GiB and more"
        over = [estimate for estimate, _ in counts if estimate.total > least]
        fits = f"{over[0].process} does not fit one" if over else "each process fits one"
        return [f"{has}: {fits}"]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = sum(count * estimate.total for estimate, count in counts)
    fits = "enough" if needed < free else "NOT enough"
    return [
        f"all on this host's CPUs: about {needed / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB are "
        f"free: {fits}"
    ]


def _device_bytes() -> list[int]:
    """Return the memory of each GPU of this host."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        torch.cuda.get_device_properties(index).total_memory
        for index in range(torch.cuda.device_count())
    ]
