"""The policy: a Qwen2 of 129,728 parameters and a tokenizer with one token a character.

Both live in one Hugging Face folder. It is an ordinary `transformers` model, so that everything
that carries its weights (FSDP, checkpoints, the Synchronizer) meets the names, tied embeddings and
grouped key-value heads of a real one.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging as transformers_logging

PAD = "<pad>"
END = "<eos>"
UNKNOWN = "<unk>"

# Every character of the tasks' prompts and answers is a token of its own.
_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "

_MAX_POSITIONS = 128


@contextmanager
def isolated_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generators for the block, then put them back as they were.

    That is the CPU's, and the one of `device` where it is a CUDA device. For code that draws from
    the global generator and takes no other: weight initialisation, Hugging Face `generate`. There
    is one for the whole process, so only one thread at a time may be in such a block.
    """
    cuda = device is not None and device.type == "cuda"
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if cuda else []))
        # Not torch.manual_seed: it also seeds the CUDA devices that fork_rng does not put back.
        torch.default_generator.manual_seed(seed)
        if cuda:
            stack.enter_context(torch.cuda.device(device))
            torch.cuda.manual_seed(seed)
        yield


def create_policy(folder: Path, seed: int) -> None:
    """Write a random policy and its tokenizer into `folder`: the same weights for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _character_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=True,
        # At this width the usual 0.02 leaves the logits nearly flat and the warm-up slow to begin.
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with isolated_rng(seed):
        model = Qwen2ForCausalLM(config)
    save_policy(model, folder)
    tokenizer.save_pretrained(folder)


def save_policy(model: PreTrainedModel, folder: Path) -> None:
    """Write the model's weights and configuration into `folder`, whose tokenizer stays as it is."""
    with _no_progress_bars():
        model.save_pretrained(folder)


def load_policy(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model (float32, on the CPU, for evaluation) and tokenizer; the hub is never asked."""
    if not (folder / "config.json").is_file():
        # transformers would take a missing folder for the name of a repository on the hub.
        raise FileNotFoundError(f"no policy in {folder}: config.json is missing")
    with _no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return model, tokenizer


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    # They take milliseconds here, and would be printed into the log of every worker.
    bars: Any = transformers_logging  # its functions have no annotations
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _character_tokenizer() -> PreTrainedTokenizerFast:
    tokens = [PAD, END, UNKNOWN, *_CHARACTERS]
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    # Without a decoder tokens are joined by spaces.
    backend.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast  # its constructor has no annotations
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_POSITIONS,
    )
    return tokenizer
