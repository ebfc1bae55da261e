"""Head of one output in Hugging Face folders: critics and reward models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from .pretrained import HeadRefused

HEAD = {"score.weight", "score.bias"}
"""Names of the head's tensors, as in transformers' models for classification."""

_TENSORS = {"TokenClassification": HEAD, "SequenceClassification": {"score.weight"}}


def head_tensors(config: Any) -> set[str]:
    """Return the head's tensors in folders of this configuration; a language model has none."""
    name = "".join((config.architectures or [])[:1])
    tensors = {
        tensor for kind, names in _TENSORS.items() if name.endswith(kind) for tensor in names
    }
    if not getattr(config, "token_classification_bias", True):
        tensors.discard("score.bias")
    return tensors


def checked_head(config: Any, folder: Path, *, required: bool = False) -> set[str]:
    """Return :func:`head_tensors` of a folder's configuration.

    Raises:
        BadPolicy: for a head of several outputs, and for none if it is required.
    """
    tensors = head_tensors(config)
    if tensors and config.num_labels != 1:
        raise HeadRefused(folder, "outputs", config.num_labels)
    if required and not tensors:
        raise HeadRefused(folder, "none")
    return tensors


def critic_config(config: Any) -> Any:
    """Return the configuration of a critic with the layers of a model of this configuration."""
    made = copy.deepcopy(config)
    made.num_labels = 1
    # The source may be a model without it, and a critic's own head has a bias.
    made.token_classification_bias = True
    made.architectures = [
        name.replace("CausalLM", "TokenClassification").replace(
            "SequenceClassification", "TokenClassification"
        )
        for name in config.architectures or ()
    ]
    return made
