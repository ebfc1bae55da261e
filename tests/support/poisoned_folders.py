"""Hugging Face folders with a value that is not finite."""

from __future__ import annotations

import math
from pathlib import Path

from safetensors.torch import load_file, save_file

POISONED = "model.layers.1.mlp.up_proj.weight"
"""Tensor with that value."""


def poisoned_copy(folder: Path, target: Path) -> Path:
    """Copy a Hugging Face folder, with one value of a tensor infinite."""
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    [file] = target.glob("*.safetensors")
    tensors = load_file(file)
    tensors[POISONED][0, 1] = math.inf
    save_file(tensors, file, metadata={"format": "pt"})
    return target
