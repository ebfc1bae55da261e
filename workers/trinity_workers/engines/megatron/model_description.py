"""Description of a model in a Hugging Face folder: all files but the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...learning.value_head import head_tensors
from ...storage.durable_files import make_folder, sync_tree
from ...storage.huggingface_files import UserFiles, read_user_files, write_config, write_user_files
from ..model_folder import has_separate_head

GENERATION_CONFIG = "generation_config.json"


class Description(Struct, frozen=True):
    """Configuration, tokenizer and generation defaults of one model."""

    config: Any
    tokenizer: Any
    """Tokenizer; None if the folder has none."""
    files: UserFiles
    """Files that every folder of the model has with the same bytes."""

    @property
    def generation_config(self) -> bytes | None:
        """Generation defaults; None if the folder has none."""
        return self.files.get(GENERATION_CONFIG)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer: the tokenizer's, and those of the model's defaults."""
        defaults = {"eos_token_id": getattr(self.config, "eos_token_id", None)}
        if self.generation_config is not None:
            # As in transformers, generation defaults win over those of the configuration.
            defaults |= json.loads(self.generation_config)
        more = defaults["eos_token_id"]
        tokens = [
            getattr(self.tokenizer, "eos_token_id", None),
            *(more if isinstance(more, list) else [more]),
        ]
        return frozenset(int(token) for token in tokens if token is not None)


def read_description(folder: Path) -> Description:
    """Read all of the folder but the weights.

    A configuration that says tied of weights with a head of their own is corrected, as transformers
    loads such a folder.
    """
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = None
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.tie_word_embeddings and not head_tensors(config) and has_separate_head(folder):
        config.tie_word_embeddings = False
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    return Description(config, tokenizer, read_user_files(folder))


def write_description(folder: Path, description: Description) -> None:
    """Write a description into a folder; durable on return."""
    make_folder(folder)
    write_config(folder, description.config)
    write_user_files(folder, description.files)
    sync_tree(folder)
