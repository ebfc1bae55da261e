"""Batches in veRL's layout without padding, and losses as its engines call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ...algorithms.logits import TokenStatistics
from ...learning.finite import with_backward_gradient

if TYPE_CHECKING:
    from tensordict import TensorDict

    from ...algorithms.batch import Batch

LossOf: TypeAlias = Callable[["Batch", TokenStatistics], Tensor]
"""Returns a micro-batch's loss to differentiate, from log-probabilities and entropies [B, R]."""
MICRO_BATCH = "micro_batch"
"""Field [B] of a batch in veRL's layout: number of the micro-batch that the row is of."""


def no_padding(
    batch: Batch, temperature: float, *, rows: int | None = None, **settings: Any
) -> TensorDict:
    """Return a batch in veRL's layout without padding.

    Args:
        batch: Rows of all micro-batches.
        temperature: Temperature that sampled.
        rows: Rows of a micro-batch, of which the batch has a multiple; by default it is one.
        settings: Values for veRL's engine that are no tensors.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    size = len(batch) if rows is None else rows
    attended = batch.attention_mask.bool()
    offsets = torch.nn.functional.pad(attended.sum(dim=-1).cumsum(dim=0), (1, 0))

    def packed(tensor: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(tensor[attended], offsets)

    data = TensorDict(
        {
            "input_ids": packed(batch.input_ids),
            "position_ids": packed(batch.position_ids),
            "loss_mask": batch.response_mask.long(),
            MICRO_BATCH: torch.arange(len(batch), device=batch.input_ids.device) // size,
        },
        batch_size=[len(batch)],
    )
    settings |= {
        "temperature": temperature,
        "use_remove_padding": False,
        "use_fused_kernels": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": size,
    }
    tensordict_utils.assign_non_tensor(data, **settings)
    return data


def loss_function(loss_of: LossOf, *parts: Batch) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Return the losses of micro-batches as one function that veRL's engine calls for each."""

    def loss(
        *, model_output: dict[str, Tensor], data: TensorDict, **_: Any
    ) -> tuple[Tensor, dict[str, float]]:
        # A pipeline interleaves micro-batches: each names itself.
        part = parts[int(data[MICRO_BATCH][0])]
        entropy = model_output.get("entropy")
        current = TokenStatistics(
            select_response_tokens(model_output["log_probs"], part),
            None if entropy is None else select_response_tokens(entropy, part),
        )
        return with_backward_gradient(loss_of(part, current)), {}

    return loss


def select_response_tokens(jagged: Tensor, batch: Batch) -> Tensor:
    """Return values of response tokens [B, R] from those of the tokens before them, jagged."""
    values = jagged.values().float()
    attended = batch.attention_mask.bool()
    wide = values.new_zeros(attended.shape).masked_scatter(attended, values)
    return wide[:, batch.prompt_width - 1 : -1].masked_fill(~batch.response_mask, 0.0)
