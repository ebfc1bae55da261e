"""Small policies that vLLM takes on a CPU: attention there refuses a head of 16."""

import torch
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trinity_workers.learning.policy import create_policy, isolated_rng, save_policy

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {**EXPERTS, "shared_expert_intermediate_size": 64},
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**EXPERTS, "head_dim": 64, "norm_topk_prob": True},
    ),
}


def create_vllm_policy(
    folder,
    *,
    tied=True,
    seed=0,
    kv_heads=1,
    architecture="qwen2",
    dtype=torch.float32,
):
    """Write a random policy with heads of 64 into a folder, and return the folder."""
    create_policy(folder, seed)  # its tokenizer
    configuration, model_class, own = ARCHITECTURES[architecture]
    base = Qwen2Config.from_pretrained(folder)
    config = configuration(
        vocab_size=base.vocab_size,
        eos_token_id=base.eos_token_id,
        bos_token_id=None,
        pad_token_id=base.pad_token_id,
        initializer_range=base.initializer_range,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        intermediate_size=256,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        **own,
    )
    with isolated_rng(seed):
        model = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # they begin as zeros, which no check could tell apart
                    parameter.normal_(std=0.02)
    save_policy(model.to(dtype), folder)
    return folder
