"""Tiny random models of several architectures, as a user's own: byte pairs and a chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_TEXT = [f"{a} + {b} = {a + b}\nuser assistant system" for a in range(30) for b in range(30)]
_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def _tokenizer() -> Any:
    """Return a byte-pair tokenizer without a padding token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|start|>", "<|end|>", "<|text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def _llama(**common: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**common))


def _qwen2(**common: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**common, tie_word_embeddings=True))


def _qwen3(**common: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**common, head_dim=8))


def _qwen3_moe(**common: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **common, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    return Qwen3MoeForCausalLM(config)


MODELS: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3-moe": _qwen3_moe,
}


def own_model(folder: Path, name: str, seed: int = 0) -> Path:
    """Write a random model of an architecture into a Hugging Face folder."""
    from trinity_workers.learning.policy import isolated_rng, save_policy

    tokenizer = _tokenizer()
    with isolated_rng(seed):
        model = MODELS[name](
            **_COMMON,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=None,
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_policy(model, folder)
    tokenizer.save_pretrained(folder)
    return folder
