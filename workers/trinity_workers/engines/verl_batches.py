"""Batches in veRL's layout without padding, and losses as its engines call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ..algorithms.logits import TokenStatistics
from ..learning.finite import with_backward_gradient

if TYPE_CHECKING:
    from tensordict import TensorDict

    from ..algorithms.batch import Batch

LossOf: TypeAlias = Callable[["Batch", TokenStatistics], Tensor]
"""Returns a micro-batch's loss to differentiate, from log-probabilities and entropies [B, R]."""


def no_padding(batch: Batch, temperature: float, **settings: Any) -> TensorDict:
    """Return a batch in veRL's layout without padding, as one micro-batch."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    attended = batch.attention_mask.bool()
    offsets = torch.nn.functional.pad(attended.sum(dim=-1).cumsum(dim=0), (1, 0))

    def packed(tensor: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(tensor[attended], offsets)

    data = TensorDict(
        {
            "input_ids": packed(batch.input_ids),
            "position_ids": packed(batch.position_ids),
            "loss_mask": batch.response_mask.long(),
        },
        batch_size=[len(batch)],
    )
    settings |= {
        "temperature": temperature,
        "use_remove_padding": False,
        "use_fused_kernels": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(batch),
    }
    tensordict_utils.assign_non_tensor(data, **settings)
    return data


def loss_function(loss_of: LossOf, part: Batch) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Return a loss as veRL's engine calls it."""

    def loss(*, model_output: dict[str, Tensor], **_: Any) -> tuple[Tensor, dict[str, float]]:
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
