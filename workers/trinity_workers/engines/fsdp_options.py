"""Options by which an FSDP engine trades time, or the host's memory, for the device's."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from trinity_events.errors import TrinityError

from ..learning.packing import pack_rows
from .fsdp_context import ContextRanks, share_sequences
from .fsdp_tensor import TensorRanks


class RecomputeRefused(TrinityError):
    """A model cannot compute its activations again.

    Attributes:
        model: Its class.
    """

    model: str
    text = "{model} cannot compute its activations again: set trainer.recompute false"


class FSDPOptions(Struct, frozen=True, kw_only=True):
    """Options of a model on FSDP that change its memory, and none of its numbers."""

    recompute: bool = False
    """If True, each layer's activations are computed again in the backward pass, not stored."""
    cpu_offload: bool = False
    """If True, parameters, gradients and optimizer state stay in the host's memory.

    A layer's parameters are on the device while it computes.
    """
    packing: bool = False
    """If True, rows go through the model as one row without padding."""
    shard_layers_from: int = 10_000_000
    """Parameters from which each layer is gathered by itself: below, one all-gather is faster."""
    context: ContextRanks | None = None
    """Ranks that share this rank's sequences; None if it has them whole."""
    tensor: TensorRanks | None = None
    """Ranks of which neighbours share every layer; None if each has layers whole."""

    def prepare(self, model: Any) -> None:
        """Set up recomputation, packing and shared sequences in a model that is not sharded yet.

        Raises:
            RecomputeRefused: if the model has no recomputation.
            ContextRefused: if ranks cannot share the sequences of such a model.
        """
        if self.recompute:
            _recompute(model)
        if self.packing:
            pack_rows(model)
        if self.context is not None:
            share_sequences(model, self.context.group)


def _recompute(model: Any) -> None:
    # A critic is no model of transformers, and its layers are.
    owner = model if hasattr(model, "supports_gradient_checkpointing") else model.base_model
    if not getattr(owner, "supports_gradient_checkpointing", False):
        raise RecomputeRefused(type(model).__name__)
    # Named differently before transformers 5.23; the argument is the same.
    enable = getattr(owner, "activation_checkpointing_enable", None)
    keywords = {"use_reentrant": False}
    if enable is None:
        owner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords)
    else:
        enable(activation_checkpointing_kwargs=keywords)
