"""What a Hugging Face folder says of a model, beside its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..files import make_folder, sync_tree


def read_description(folder: Path) -> tuple[Any, Any]:
    """The folder's configuration, and its tokenizer or None."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = None
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return config, tokenizer


def write_description(folder: Path, config: Any, tokenizer: Any) -> None:
    """Write them into a folder; on disk on return."""
    make_folder(folder)
    config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    sync_tree(folder)
