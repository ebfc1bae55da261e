"""Small policies that vLLM takes on a CPU: attention there refuses a head of 16."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trinity_workers.learning.policy import create_policy, isolated_rng, save_policy


def create_vllm_policy(
    folder, *, tied=True, seed=0, positions=64, hidden=128, layers=2, kv_heads=1
):
    """Write a random policy with heads of 64 into a folder, and return the folder."""
    create_policy(folder, seed)  # its tokenizer
    config = Qwen2Config.from_pretrained(folder)
    config.update(
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": kv_heads,
            "intermediate_size": 2 * hidden,
            "max_position_embeddings": positions,
            "tie_word_embeddings": tied,
            "layer_types": ["full_attention"] * layers,
            "max_window_layers": layers,
        }
    )
    with isolated_rng(seed):
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # they begin as zeros, which no check could tell apart
                    parameter.normal_(std=0.02)
    save_policy(model, folder)
    return folder
