"""Reward models of tests: tiny, with tokens unlike the policy's."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from tests.support import megatron_ranks as at
from trinity_workers.learning.policy import isolated_rng

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }}{% endfor %}"
)


def tokenizer_of_pairs() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are two characters or one, unlike the policy's."""
    letters = "abcdefghijklmnopqrstuvwxyz>"
    words = ["<pad>", "<eos>", "<unk>", *letters, *(a + b for a in "abctu" for b in "abctd>")]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r".."), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_reward_folder(folder: Path, *, template: bool = False) -> Path:
    """Write a random reward model with that tokenizer, which may have a chat template."""
    tokenizer = tokenizer_of_pairs()
    if template:
        tokenizer.chat_template = TEMPLATE
    sizes = {**at.SIZES, "vocab_size": len(tokenizer), "num_labels": 1, "pad_token_id": 0}
    with isolated_rng(5):
        Qwen2ForSequenceClassification(Qwen2Config(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
