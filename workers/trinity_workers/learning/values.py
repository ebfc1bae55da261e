"""Models with a head of one value a token: critics, and reward models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..algorithms.batch import Batch
from ..algorithms.logits import exact
from .policy import load_policy
from .value_head import critic_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ValueModel(nn.Module):
    """Model of values: the layers of a causal language model, and a linear head.

    Parameters have the names of transformers' models for classification, as in veRL's critic.

    Args:
        layers: The model without a head.
        config: Configuration of the whole.
        head: The head.
        unsplit: Classes of layers that FSDP shards as one.
    """

    def __init__(self, layers: Any, config: Any, head: nn.Linear, unsplit: Any) -> None:
        super().__init__()
        self.model = layers
        self.config = config
        self._no_split_modules = unsplit
        self.score = head

    @property
    def base_model(self) -> Any:
        """Layers without the head, as models of transformers name them."""
        return self.model

    def forward(self, **inputs: Any) -> Tensor:
        """Return the value after each token: [B, S, 1].

        FSDP takes no view for an output, and a linear layer may return one.
        """
        values: Tensor = self.score(self.model(**inputs).last_hidden_state)
        return values.clone()


def load_critic(folder: Path, dtype: str = "float32") -> tuple[ValueModel, PreTrainedTokenizerBase]:
    """Load the folder's policy as a critic, and its tokenizer. Raises BadPolicy as load_policy.

    A folder without an output head will do: the head of values replaces it.

    The head of values begins at 0, so that the first values are 0 and all ranks begin alike.
    """
    model, tokenizer = load_policy(folder, dtype, without_head=True)
    policy: Any = model
    output = policy.get_output_embeddings().weight
    head = nn.Linear(output.shape[1], 1, dtype=output.dtype)
    # Random values would be noise in the advantages until the critic has learnt.
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    config = critic_config(policy.config)
    return ValueModel(policy.base_model, config, head, policy._no_split_modules), tokenizer


def response_values(model: nn.Module, batch: Batch) -> Tensor:
    """Return the value before each response token: [B, R] float32 with gradient, 0 on padding."""
    # (B, R). The value before a token is the output of the column before it.
    before = _outputs(model, batch)[:, batch.prompt_width - 1 : -1]
    return before.masked_fill(~batch.response_mask, 0.0)


def last_values(model: nn.Module, batch: Batch) -> Tensor:
    """Return the output at the last token of each row: [B] float32."""
    outputs = _outputs(model, batch)
    return outputs.gather(1, last_columns(batch)[:, None]).squeeze(1)


def last_columns(batch: Batch) -> Tensor:
    """Return the column of the last token of each row: [B] int64."""
    columns = batch.attention_mask.shape[1]
    # argmax() returns the first of equal values, which reversed is the last attended column.
    return columns - 1 - batch.attention_mask.flip(1).argmax(dim=1)


def _outputs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the head's output after each token: [B, S], float32 at least."""
    outputs = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    )
    return exact(outputs[..., 0])
