"""Critic: the architecture of a policy, with a head that gives one value a token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..algorithms.batch import Batch
from ..algorithms.logits import exact
from .policy import load_policy


class ValueModel(nn.Module):
    """Model of values: the layers of a causal language model, and a linear head.

    The head begins at 0, so that the first values are 0 and all ranks begin alike. Parameters have
    the names of transformers' models for token classification, as in veRL's critic.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.model = policy.base_model
        self.config = copy.deepcopy(policy.config)
        self.config.num_labels = 1
        self.config.architectures = [
            name.replace("CausalLM", "TokenClassification")
            for name in policy.config.architectures or ()
        ]
        self._no_split_modules = policy._no_split_modules
        head = policy.get_output_embeddings().weight
        self.score = nn.Linear(head.shape[1], 1, dtype=head.dtype)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    @property
    def base_model(self) -> Any:
        """Layers without the head, as models of transformers name them."""
        return self.model

    def forward(self, **inputs: Any) -> Tensor:
        """Return the value after each token: [B, S, 1]. FSDP takes no view for an output."""
        values: Tensor = self.score(self.model(**inputs).last_hidden_state)
        return values


def load_critic(folder: Path, dtype: str = "float32") -> tuple[ValueModel, PreTrainedTokenizerBase]:
    """Load the folder's policy as a critic, and its tokenizer. Raises BadPolicy as load_policy."""
    policy, tokenizer = load_policy(folder, dtype)
    return ValueModel(policy), tokenizer


def response_values(model: nn.Module, batch: Batch) -> Tensor:
    """Return the value before each response token: [B, R] float32 with gradient, 0 on padding."""
    values = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    )
    before: Tensor = exact(values[:, batch.prompt_width - 1 : -1, 0])
    return before.masked_fill(~batch.response_mask, 0.0)
