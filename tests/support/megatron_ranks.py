"""Tiny models, and what tests of Megatron let their ranks do."""

from __future__ import annotations

import gc
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.experiences import group
from tests.support.rank_processes import GROUP_TIMEOUT, Rank
from tests.support.tensors import identical
from trinity_workers.algorithms.batch import Batch
from trinity_workers.algorithms.collate import collate
from trinity_workers.engines.megatron import (
    MegatronEngine,
    ModelOptions,
    OptimizerOptions,
    ParallelLayout,
    leave,
)
from trinity_workers.engines.megatron.layout import join as join_layout
from trinity_workers.learning.policy import isolated_rng

SIZES = {
    "vocab_size": 98,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LATENTS = {
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "kv_lora_rank": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-untied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**{**SIZES, "vocab_size": 97, "num_key_value_heads": 4}),
    "llama-one-group": lambda: LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "llama-scaled": lambda: LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen3-deep": lambda: Qwen3Config(**{**SIZES, "num_hidden_layers": 4}, head_dim=8),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=8, num_experts=4, norm_topk_prob=True
    ),
    # Groups of experts, latents of queries and YaRN, as DeepSeek-V3 has them.
    "deepseek": lambda: DeepseekV3Config(
        **{**SIZES, **LATENTS, **EXPERTS, "num_experts_per_tok": 4},
        q_lora_rank=16,
        n_group=4,
        topk_group=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
        },
    ),
    # One group, queries without latents, and another epsilon, as Moonlight has them.
    "moonlight": lambda: DeepseekV3Config(
        **{**SIZES, **LATENTS, **EXPERTS, "num_hidden_layers": 4},
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        rms_norm_eps=1e-5,
    ),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_experts=4, shared_expert_intermediate_size=32
    ),
}


def make_folder(folder: Path, name: str) -> Path:
    """A Hugging Face folder of a random model in which no two weights are equal, biases too."""
    with isolated_rng(0):
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    return folder


def in_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's weights by name."""
    return {
        name: value
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def unpadded(tokens: torch.Tensor) -> Batch:
    """Rows [B, S] of real tokens, all but the first of them responses, as a batch."""
    rows, columns = tokens.shape
    return Batch(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        position_ids=torch.arange(columns).repeat(rows, 1),
        response_mask=torch.ones(rows, columns - 1, dtype=torch.bool),
        groups=torch.arange(rows),
        rewards=torch.ones(rows),
        finished=torch.ones(rows, dtype=torch.bool),
    )


def make_engine(
    rank: Rank,
    folder: Path,
    layout: ParallelLayout,
    optimizer: OptimizerOptions | None = None,
    options: dict[str, Any] | None = None,
    device: str = "cpu",
    **keywords: Any,
) -> None:
    """Make the rank's engine, in the place of the one before."""
    if not hasattr(rank.objects, "engine"):
        rank.exits.callback(drop_engine, rank)
    drop_engine(rank)
    rank.objects.engine = MegatronEngine(
        folder,
        device=torch.device(device),
        layout=layout,
        optimizer=optimizer,
        model=ModelOptions(**{"timeout": GROUP_TIMEOUT} | (options or {})),
        **keywords,
    )


def join(rank: Rank, layout: ParallelLayout) -> None:
    """Join a layout beside the engine's."""
    join_layout(layout, seed=0)


def drop_engine(rank: Rank) -> None:
    """Forget the rank's engine and its layout."""
    rank.objects.engine = None
    gc.collect()
    leave()


def count_gloo_threads() -> int:
    """Count the threads of Gloo's groups in this process."""
    count = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            count += "gloo" in name.read_text()
    return count


def full_weights(rank: Rank) -> dict[str, torch.Tensor]:
    """What the engine streams."""
    return {name: value.clone() for name, value in rank.objects.engine.get_per_tensor_param()}


def logits(rank: Rank, batch: Batch) -> torch.Tensor | None:
    """The engine's logits."""
    return rank.objects.engine.logits(batch)


def padded_batch(seed: int, rows: int = 6) -> Batch:
    """Rows of prompts of 1 to 6 tokens and responses of 1 to 7, padded on both sides."""
    lot = random.Random(seed)
    groups = []
    for _ in range(rows // 2):
        prompt = [lot.randint(0, 96) for _ in range(lot.randint(1, 6))]
        responses = [[lot.randint(0, 96) for _ in range(lot.randint(1, 7))] for _ in range(2)]
        logprobs = [[-4.5] * len(response) for response in responses]
        groups.append(group(prompt, responses, logprobs, [0.0, 1.0]))
    return collate(groups, 0)


def train(rank: Rank, batches: list[Batch]) -> list[float]:
    """Steps on the cross-entropy of the responses; their losses, over all replicas' tokens.

    Replicas each take their share of the rows, pipeline stages but the last return nothing.
    """
    engine: MegatronEngine = rank.objects.engine
    share, shares = data_rank()
    losses = []
    for batch in batches:
        mine = batch.rows(len(batch) * share // shares, len(batch) * (share + 1) // shares)
        tokens = batch.token_count

        def loss(current, _, tokens=tokens):
            value = -current.logprobs.sum() / tokens
            return value * shares, {"loss": float(value.detach())}

        metrics, norm = engine.train_batch(mine, loss)
        assert norm > 0
        losses.append(sum(step_metrics["loss"] for step_metrics in metrics))
    total = torch.tensor(losses)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.tolist()


def data_rank() -> tuple[int, int]:
    """Which replica the rank is of, and of how many."""
    return (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )


def logprobs(rank: Rank, batch: Batch) -> torch.Tensor | None:
    """The engine's log-probabilities of the responses."""
    return rank.objects.engine.response_logprobs(batch, temperature=0.7)


def assert_same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """The same names, and the same bits."""
    assert sorted(first) == sorted(other)
    for key, value in first.items():
        assert identical(value, other[key]), key
