"""Settings of what leaves a model's device while the model is idle; without torch."""

from __future__ import annotations

from ..section import Section


class Offload(Section, frozen=True, kw_only=True):
    """Parts of a trained model that are moved to the host's memory while the model is idle."""

    param_offload: bool = False
    """Move the parameters away while nothing computes with them or reads them."""
    grad_offload: bool = False
    """Free the gradients between two steps; they are zero when they come back."""
    optimizer_offload: bool = False
    """Move the optimizer's state, and its copies of the parameters, away between two steps."""


class FrozenOffload(Section, frozen=True, kw_only=True):
    """Parts of a frozen model (reference, teacher) that are moved to the host while it is idle."""

    param_offload: bool = False
    """Move the parameters away while nothing computes with them."""
