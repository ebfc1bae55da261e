"""Context parallelism on FSDP: ranks that share every sequence of a Hugging Face model.

1. The C ranks of a group have the same batch. A rank's layers compute its own columns alone, of
   rows that begin with their first token: padding is on the right, where a causal mask hides it.
2. Behind the last layer the hidden states of all columns are gathered. The ranks share the work of
   the head, and all of them compute the same loss.
3. Gradients of what was gathered add up over the group. So the gradient of each parameter, added
   up over the group, is C times that of one rank with whole sequences: a step multiplies its loss
   by the number of replicas, where FSDP takes the mean over all ranks.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from trinity_events.errors import TrinityError

from .context_parallel import SequenceShare, causal_attention, gather_sequence

_ATTENTION = "trinity-context"
"""Name of the attention in transformers' registry."""
AGREEMENT = 0.01
"""Largest difference of a logit, as a share of the largest one; rounding is far below it."""


class ContextRefused(TrinityError):
    """Ranks cannot share the sequences of a model.

    Attributes:
        fault: ``attention`` for attention that is more than causal, ``logits`` if the model
            computes others than with whole sequences, ``class`` for a model without
            transformers' interface of attention.
        model: Class of the model, or of its attention.
        option: Option of the attention.
    """

    fault: Literal["attention", "logits", "class"]
    model: str
    option: str = ""
    texts: ClassVar = {
        "attention": "{model} has {option}, and ranks that share a sequence have plain causal "
        "attention alone: set trainer.context_parallel 1",
        "logits": "{model} computes other logits where ranks share its sequences: set "
        "trainer.context_parallel 1",
        "class": "ranks cannot share the sequences of {model}, whose attention is not of "
        "transformers' interface: set trainer.context_parallel 1",
    }


class ContextRanks(NamedTuple):
    """Groups of a rank whose sequences are shared."""

    group: dist.ProcessGroup
    """The C ranks that share this rank's sequences."""
    replicas: dist.ProcessGroup
    """Ranks that have the same columns, each of other rows."""

    @classmethod
    def of(cls, context: int, device: torch.device) -> Self | None:
        """Return the groups of so many neighbouring ranks each; None for one. Collective.

        Each call makes groups, whose threads stay until the default group is destroyed.
        """
        if context == 1:
            return None
        shape = (dist.get_world_size() // context, context)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicas", "context"))
        return cls(mesh.get_group("context"), mesh.get_group("replicas"))


def share_sequences(model: Any, group: dist.ProcessGroup) -> None:
    """Let the layers of a model compute the columns of this rank alone.

    The hidden states that the model's head gets are those of all columns, in their order. Passes
    that use a cache are not shared: each rank generates from its own prompts.

    Raises:
        ContextRefused: if the model has no attention that can be replaced.
    """
    _register_attention()
    layers = model.base_model
    if not hasattr(layers, "set_attn_implementation"):
        raise ContextRefused("class", type(model).__name__)
    layers.set_attn_implementation(_ATTENTION)
    pass_ = _SharedPass(group)
    layers.register_forward_pre_hook(pass_.divide, with_kwargs=True)
    layers.register_forward_hook(pass_.gather)


def check_shared(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare logits of shared sequences with those of whole ones. Collective.

    Raises:
        ContextRefused: if they differ.
    """
    # Two columns for each chunk, and padding on both sides.
    columns = 4 * group.size() + 2
    rows = torch.arange(2 * columns, device=device).view(2, -1) % 7 + 1
    mask = torch.ones_like(rows)
    mask[0, :2], mask[1, -3:] = 0, 0
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    given = {"input_ids": rows, "attention_mask": mask, "position_ids": positions}
    was_training = module.training
    module.eval()
    with torch.no_grad():
        # (2, S, V). A pass with a cache is of whole sequences.
        whole, shared = (module(**given, use_cache=cached).logits for cached in (True, False))
    module.train(was_training)
    differences = (whole - shared).float().abs()[mask.bool()]
    if not differences.max() <= AGREEMENT * whole.float().abs().max():
        raise ContextRefused("logits", type(module).__name__)


class _SharedPass:
    """Hooks of one model, and what the forward pass under way must remember."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._places: Tensor | None = None
        """[B, S] int64. Column of each token in its shifted row; None if a pass is not shared."""

    def divide(
        self, module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the columns of this rank."""
        self._places = None
        # transformers caches by default, and a cache has all columns of a rank's own rows.
        if inputs.get("use_cache", True):
            return args, inputs
        if args:
            raise ContextRefused("class", type(module).__name__)
        mask = inputs["attention_mask"]
        columns, device = mask.shape[1], mask.device
        firsts = mask.argmax(dim=1)[:, None]  # (B, 1): argmax() returns the first of equal values
        everywhere = torch.arange(columns, device=device)[None]  # (1, S)
        self._places = (everywhere - firsts) % columns
        # The remainder takes the padding of the left around to the right.
        tokens = inputs["input_ids"].gather(1, (everywhere + firsts) % columns)
        tokens = functional.pad(tokens, (0, -columns % (2 * self._group.size())))
        share = SequenceShare(tokens.shape[1], self._group, device)
        shared = {
            "input_ids": share.select(tokens),  # (B, S / C)
            "position_ids": share.columns.expand(len(tokens), -1),
            # Of four dimensions, so that the model makes no mask of it: all is seen.
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
            "sequence_group": self._group,
        }
        return args, inputs | shared

    def gather(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output with hidden states [B, S, H] of all columns. Collective."""
        del module, args
        if self._places is not None:
            own = output.last_hidden_state.transpose(0, 1)  # (S / C, B, H)
            hidden = gather_sequence(own, self._group, sum_gradients=True).transpose(0, 1)
            places = self._places[..., None].expand(-1, -1, hidden.shape[-1])
            output.last_hidden_state = hidden.gather(1, places)
        return output


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, S / C, H, D] by transformers' interface, from [B, H, S / C, D]."""
    for option in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(option) is not None:
            raise ContextRefused("attention", type(module).__name__, option)
    if sequence_group is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return attended
    columns_first = [tensor.permute(2, 0, 1, 3) for tensor in (query, key, value)]
    shared = causal_attention(
        columns_first[0],
        columns_first[1],
        columns_first[2],
        sequence_group,
        scale=options.get("scaling"),
        dropout=options.get("dropout", 0.0),
    )
    return shared.transpose(0, 1), None
