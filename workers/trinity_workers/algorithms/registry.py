"""Advantages and losses by name: built in, by entry point, or a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ..tasks.errors import FunctionUnusable
from ..tasks.objects import load_object, refused_arguments
from .built_in import ADVANTAGES, POLICY_LOSSES

if TYPE_CHECKING:
    from .types import Advantage, PolicyLoss

ADVANTAGE_GROUP = "trinity_events.advantages"
"""Group of entry points under which packages offer advantages."""
LOSS_GROUP = "trinity_events.policy_losses"
"""Group of entry points under which packages offer losses of the policy."""


# Each micro-batch looks its loss up, and entry points are read from disk.
@cache
def find_advantage(name: str) -> Advantage:
    """Return the advantage of that name. Raises TaskError if there is none."""
    advantage: Advantage = _load_function(name, "advantage", ADVANTAGE_GROUP, ADVANTAGES, 3)
    return advantage


@cache
def find_policy_loss(name: str) -> PolicyLoss:
    """Return the loss of that name. Raises TaskError if there is none."""
    loss: PolicyLoss = _load_function(name, "loss", LOSS_GROUP, POLICY_LOSSES, 2)
    return loss


_TAKEN = {"advantage": "(batch, config, reduce)", "loss": "(tokens, config)"}


def _load_function(
    name: str, kind: str, group: str, built_in: Mapping[str, str], count: int
) -> Any:
    function = load_object(name, kind=kind, group=group, built_in=built_in)
    if not callable(function):
        raise FunctionUnusable(kind, name, "callable", _TAKEN[kind])
    if (fault := refused_arguments(function, count)) is not None:
        raise FunctionUnusable(kind, name, "arguments", _TAKEN[kind], fault)
    return function
