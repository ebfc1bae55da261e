"""Packing: rows of a batch go through a model as one row without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trinity_events.errors import TrinityError

_ISOLATION = 0.01
"""Largest share of a logit by which one sample may change another's; rounding is far below it."""


class PackingRefused(TrinityError):
    """Raised if a model does not keep packed samples apart."""


def pack_rows(module: nn.Module) -> None:
    """Let a module compute padded rows as one packed row; callers see padded rows in and out.

    Positions begin at 0 with each sample, and no attention mask is given: by that, the models of
    transformers know where a sample begins, and let no token attend to another sample. Logits, or
    the tensor that the module returns, are 0 on padding.
    """
    packing = _Packing()
    module.register_forward_pre_hook(packing.pack, with_kwargs=True)
    module.register_forward_hook(packing.unpack)


def check_isolation(module: nn.Module, device: torch.device) -> None:
    """Compute two packed samples twice, with another first one. Collective if it is sharded.

    Raises PackingRefused if the second sample's logits depend on the first.
    """
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], device=device)
    found = []
    was_training = module.training
    module.eval()
    for token in (1, 2):
        rows = torch.tensor([[token] * 3, [1, 2, 0]], device=device)
        with torch.no_grad():
            output: Any = module(input_ids=rows, attention_mask=mask, use_cache=False)
        found.append(output.logits[1, :2].float())
    module.train(was_training)
    if (found[0] - found[1]).abs().max() > _ISOLATION * found[0].abs().max():
        raise PackingRefused(
            f"{type(module).__name__} lets packed samples attend to one another: set "
            "trainer.packing false"
        )


class _Packing:
    """State of one forward pass: the columns that are asked for, True where a token is."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def pack(
        self, module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs without padding, as one row."""
        del module
        mask = inputs["attention_mask"].bool()
        positions = inputs.get("position_ids")
        if positions is None:
            positions = mask.long().cumsum(dim=-1) - 1
        width = mask.shape[1]
        asked = inputs.get("logits_to_keep") or width
        kept = mask & (torch.arange(width, device=mask.device) >= width - asked)
        self._kept = kept[:, width - asked :]
        packed = {
            "input_ids": inputs["input_ids"][mask][None],
            "position_ids": positions[mask][None],
            "attention_mask": None,
        }
        if "logits_to_keep" in inputs:
            packed["logits_to_keep"] = kept[mask].nonzero().squeeze(-1)
        return args, inputs | packed

    def unpack(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output in padded rows."""
        del module, args
        if isinstance(output, Tensor):
            return self._padded(output)
        output.logits = self._padded(output.logits)
        return output

    def _padded(self, values: Tensor) -> Tensor:
        assert self._kept is not None
        padded = values.new_zeros(*self._kept.shape, values.shape[-1])
        padded[self._kept] = values[0]
        return padded
