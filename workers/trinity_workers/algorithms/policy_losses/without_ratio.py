"""Losses without a ratio."""

from __future__ import annotations

from ..errors import FieldMissing
from ..settings import AlgorithmConfig
from ..types import PolicyTokens, TokenLosses


def reinforce(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """Return -A log pi, the policy gradient: for samples of the current policy.

    Source: REINFORCE (Williams 1992, doi 10.1007/BF00992696). On other samples it needs importance
    weights. Losses are [B, R] float32.
    """
    return TokenLosses(-tokens.advantages * tokens.logprobs)


def supervised(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """Return -log pi, the cross entropy of the tokens: supervised fine-tuning.

    On a teacher's samples its gradient is that of the forward KL of teacher and student
    (sequence-level distillation, arXiv 1606.07947, section 3.2). Losses are [B, R] float32.
    """
    return TokenLosses(-tokens.logprobs)


def divergence(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """Return the divergence of teacher and student at each token, which the trainer computed.

    `distillation.token_divergence` computes it from logits. Losses are [B, R] float32.
    """
    if tokens.divergence is None:
        raise FieldMissing("loss divergence", "divergence")
    return TokenLosses(tokens.divergence)
