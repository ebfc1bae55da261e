"""Packing: rows of a batch go through a model as one row without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trinity_events.errors import TrinityError

_ISOLATION = 0.01
"""Largest share of a logit by which one sample may change another's; rounding is far below it."""


class PackingRefused(TrinityError):
    """A model does not keep packed samples apart.

    Attributes:
        model: Its class.
    """

    model: str
    text = "{model} lets packed samples attend to one another: set trainer.packing false"


def pack_rows(model: Any) -> None:
    """Let the layers of a model compute padded rows as one packed row.

    Positions begin at 0 with each sample, and no attention mask is given: by that, the models of
    transformers know where a sample begins, and let no token attend to another sample. The hidden
    states that the model's head gets are those of padded rows, 0 on padding. Passes that use a
    cache are not packed.
    """
    packing = _Packing()
    model.base_model.register_forward_pre_hook(packing.pack, with_kwargs=True)
    model.base_model.register_forward_hook(packing.unpack)


def check_isolation(module: nn.Module, device: torch.device) -> None:
    """Compute two packed samples twice, with another first one. Collective if it is sharded.

    Raises PackingRefused if the second sample's logits depend on the first.
    """
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], device=device)
    logits = []
    # Dropout would differ between the two passes, as if the samples were not kept apart.
    was_training = module.training
    module.eval()
    for token in (1, 2):
        rows = torch.tensor([[token] * 3, [1, 2, 0]], device=device)
        with torch.no_grad():
            output: Any = module(input_ids=rows, attention_mask=mask, use_cache=False)
        logits.append(output.logits[1, :2].float())
    module.train(was_training)
    if (logits[0] - logits[1]).abs().max() > _ISOLATION * logits[0].abs().max():
        raise PackingRefused(type(module).__name__)


class _Packing:
    """State of one forward pass: True where a token is, or None if the pass is not packed."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None

    def pack(
        self, module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs without padding, as one row."""
        del module
        self._mask = None
        # transformers caches by default, and a cache has an entry for each row before packing.
        if inputs.get("use_cache", True):
            return args, inputs
        self._mask = mask = inputs["attention_mask"].bool()
        positions = inputs.get("position_ids")
        if positions is None:
            positions = mask.long().cumsum(dim=-1) - 1
        packed = {
            "input_ids": inputs["input_ids"][mask][None],  # (1, tokens of all rows)
            "position_ids": positions[mask][None],
            "attention_mask": None,
        }
        return args, inputs | packed

    def unpack(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output with hidden states [B, S, H] of padded rows."""
        del module, args
        if self._mask is not None:
            packed = output.last_hidden_state[0]
            hidden = packed.new_zeros(*self._mask.shape, packed.shape[-1])  # (rows, columns, H)
            hidden[self._mask] = packed
            output.last_hidden_state = hidden
        return output
