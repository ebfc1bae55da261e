"""Files of a Hugging Face folder besides its weights, as programs of any release read them.

1. Tokenizer, chat template and generation defaults have the bytes of the user's files. What
   transformers writes of a loaded tokenizer names classes that its earlier releases lack, and has
   settings of this project, such as a padding token.
2. ``config.json`` has the rotary embedding and the dtype in the spelling of transformers 5
   (``rope_parameters``, ``dtype``) and in that of transformers 4 (``rope_theta``,
   ``rope_scaling``, ``torch_dtype``), which vLLM, SGLang and llama.cpp read too.
3. The dtype in ``config.json`` is that of the weights next to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from .durable_files import whole_file

CONFIG = "config.json"

_COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("vocab*", "merges.txt", "*.model", "*.tiktoken", "tokenization_*.py"),
    *("chat_template*", "additional_chat_templates/*"),
    *("*preprocessor_config.json", "processor_config.json"),
)
"""Names in folders on the hub of what belongs to a tokenizer, or says how to generate."""
_LARGEST = 256 << 20
"""Bytes of the largest file that is copied; those of tokenizers have some tens of MiB."""

UserFiles: TypeAlias = "Mapping[str, bytes]"
"""Files by their paths in a folder."""


def read_user_files(folder: Path) -> UserFiles:
    """Read the files of a folder that every folder made from it has too.

    They are read when a model is loaded: its folder may be gone when a checkpoint is written.
    """
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for pattern in _COPIED
        for path in sorted(folder.glob(pattern))
        if path.is_file() and path.stat().st_size <= _LARGEST
    }


def write_user_files(folder: Path, files: UserFiles) -> None:
    """Write files into a folder, with their bytes."""
    for name, data in files.items():
        with whole_file(folder / name) as file:  # a resumed run reads what was there before
            file.write(data)


def write_config(folder: Path, config: Any) -> None:
    """Write a configuration of transformers, for its releases 4 and 5."""
    config.save_pretrained(folder)
    add_older_names(folder)


def add_older_names(folder: Path) -> None:
    """Add the names of transformers 4 to the ``config.json`` that transformers 5 wrote."""

    def change(values: dict[str, Any]) -> None:
        values |= _older_rope(values)
        if "dtype" in values:
            values["torch_dtype"] = values["dtype"]

    _change_config(folder, change)


def set_dtype(folder: Path, dtype: str) -> None:
    """Correct the dtype in a folder's ``config.json``, if it names another one.

    A quantised model's is the one that it computes in, and stays.
    """
    file = folder / CONFIG
    if not file.is_file() or "quantization_config" in json.loads(file.read_bytes()):
        return

    def change(values: dict[str, Any]) -> None:
        values |= {name: dtype for name in ("dtype", "torch_dtype") if values.get(name) is not None}

    _change_config(folder, change)


def set_untied(folder: Path) -> None:
    """Write into a folder's ``config.json`` that the output head is not the embedding."""

    def change(values: dict[str, Any]) -> None:
        if values.get("tie_word_embeddings"):
            values["tie_word_embeddings"] = False

    _change_config(folder, change)


def _change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change ``config.json`` and the configurations in it; one that stays equal keeps its bytes."""
    file = folder / CONFIG
    before = json.loads(file.read_bytes())
    # Read again, not copied: `change` works in place, also on nested configurations.
    after = json.loads(file.read_bytes())
    for values in (after, *(value for value in after.values() if isinstance(value, dict))):
        # The nested ones of models with several parts, such as text_config; no other mapping.
        if values is after or "model_type" in values:
            change(values)
    if after != before:
        with whole_file(file) as changed:
            changed.write(json.dumps(after, indent=2).encode() + b"\n")


def _older_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding of a configuration in the names of transformers 4."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    if "rope_theta" in rope:
        names = {
            name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope
        }
        return names | {"rope_scaling": _scaling(rope)}
    full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        return {}  # transformers 4 has no model with other kinds of layers
    older: dict[str, Any] = {
        "rope_theta": full.get("rope_theta"),
        # Gemma 3's name in transformers 4 for the base of its layers with a sliding window.
        "rope_local_base_freq": sliding.get("rope_theta"),
    }
    if str(values.get("model_type", "")).startswith("gemma3"):
        older["rope_scaling"] = _scaling(full)  # other models would take it for all layers
    return older


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the scaling of a rotary embedding; None if there is none."""
    scaling = {
        name: value
        for name, value in rope.items()
        if name not in {"rope_theta", "partial_rotary_factor"}
    }
    return None if scaling in ({}, {"rope_type": "default"}) else scaling
