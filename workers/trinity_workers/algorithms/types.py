"""Types of advantages and losses, for built-in functions and a user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor

from .batch import Batch
from .settings import AlgorithmConfig

Reduce = Callable[[Tensor], Tensor]
"""Sum of a tensor over all ranks. Every rank must call it, with the same shape."""


def this_rank_alone(tensor: Tensor) -> Tensor:
    """Return the tensor: the sum over ranks where there is one."""
    return tensor


class Advantages(NamedTuple):
    """Advantages of tokens, and the critic's targets if there is a critic: [B, R] float32."""

    advantages: Tensor
    returns: Tensor | None = None


class PolicyTokens(NamedTuple):
    """Tokens that a loss is computed of. All tensors are [B, R], and 0 where the mask is false."""

    mask: Tensor
    """bool. True on tokens that are trained on."""
    logprobs: Tensor
    """float32. Of the current policy; these carry the gradient."""
    old_logprobs: Tensor
    """float32. Of the policy in the ratio's denominator."""
    advantages: Tensor
    """float32."""
    divergence: Tensor | None = None
    """float32. Divergence of teacher and student at each token, with its gradient."""


class TokenLosses(NamedTuple):
    """Loss of each token, and metrics of each token that are shown as means."""

    losses: Tensor
    """[B, R] float32."""
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    """[B, R] each, without gradient."""


class Advantage(Protocol):
    """Function that estimates advantages of a batch that has `token_rewards`."""

    def __call__(self, batch: Batch, config: AlgorithmConfig, reduce: Reduce, /) -> Advantages:
        """Return advantages. Rows of other ranks are known through ``reduce`` alone."""
        ...


class PolicyLoss(Protocol):
    """Function that computes the loss of each token."""

    def __call__(self, tokens: PolicyTokens, config: AlgorithmConfig, /) -> TokenLosses:
        """Return losses, which the caller weighs, masks and normalises."""
        ...
