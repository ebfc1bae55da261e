"""States of all random generators of a process, as plain values and tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, and of a CUDA device's.

    ``torch.load(weights_only=True)`` reads them back: NumPy's words are a tensor.
    """
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    states: dict[str, Any] = {
        # int64, since the words are unsigned numbers of 32 bits.
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": {
            "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`random_states` returned; a CUDA state is for a CUDA device only."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy = states["numpy"]
    np.random.set_state(
        (
            # NumPy's global functions draw from this generator.
            "MT19937",
            numpy["key"].numpy().astype(np.uint32),
            numpy["position"],
            numpy["has_gauss"],
            numpy["gauss"],
        )
    )
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
