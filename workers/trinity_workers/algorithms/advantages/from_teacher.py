"""Advantages that come from a teacher, or from nothing."""

from __future__ import annotations

import torch

from ..batch import Batch
from ..settings import AlgorithmConfig
from ..types import Advantages, Reduce


def teacher(batch: Batch, config: AlgorithmConfig, reduce: Reduce) -> Advantages:
    """Return log teacher - log student of each token: on-policy distillation.

    It is the negative estimate k1 of the reverse KL of each sampled token, whose policy gradient
    is that of the KL. Sources: on-policy distillation, GKD (arXiv 2306.13649) section 3, and as an
    advantage https://thinkingmachines.ai/blog/on-policy-distillation. The student is the policy in
    the ratio's denominator. Rewards are not used.

    Returns [B, R] float32.
    """
    teacher_logprobs = batch.need("teacher_logprobs", "advantage teacher")
    student = batch.need(f"{config.importance_sampling.ratio_to}_logprobs", "advantage teacher")
    return Advantages((teacher_logprobs - student).masked_fill(~batch.response_mask, 0.0).float())


def none(batch: Batch, config: AlgorithmConfig, reduce: Reduce) -> Advantages:
    """Return 0 for each token, for losses that take no advantages."""
    return Advantages(torch.zeros_like(batch.response_mask, dtype=torch.float32))
