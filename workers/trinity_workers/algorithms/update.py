"""One update of the policy or the critic: a loss as numerator and denominator, and metrics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .aggregation import Means, loss_denominator, loss_sum
from .batch import Batch
from .importance_sampling import importance_mask, importance_weights, mismatch
from .kl import kl_estimate
from .ratios import bounded_exp
from .registry import find_policy_loss
from .settings import AlgorithmConfig
from .types import PolicyTokens


class Update(NamedTuple):
    """Loss of a part of a step's batch, which adds up with the losses of other parts.

    The loss of the step is the sum of `loss_sum` over all parts, divided by the sum of
    `denominator` over all parts.
    """

    loss_sum: Tensor
    """0-dimensional float32, with gradient."""
    denominator: Tensor
    """0-dimensional float64."""
    metrics: Means
    """Means of metrics, by veRL's names without their prefix."""

    def means(self, name: str = "loss") -> Means:
        """Return the metrics, and the loss itself by this name."""
        loss = torch.stack([self.loss_sum.detach().double(), self.denominator])
        return self.metrics + Means((name,), loss[:, None])

    def loss(self, denominator: Tensor, ranks: int = 1) -> Tensor:
        """Return the loss to differentiate on this rank.

        Args:
            denominator: Sum of `denominator` over all parts of the step, on all ranks.
            ranks: Number of ranks over which the engine averages gradients, as FSDP and DDP do;
                1 where gradients are summed.
        """
        # A step whose rows were all filtered out has denominator 0: its gradient is 0, not NaN.
        return self.loss_sum * (ranks / denominator.clamp(min=1.0)).to(self.loss_sum.dtype)


def policy_update(
    batch: Batch,
    logprobs: Tensor,
    config: AlgorithmConfig,
    *,
    entropy: Tensor | None = None,
    divergence: Tensor | None = None,
) -> Update:
    """Return the policy's loss on a part of a prepared batch.

    With w and m of `importance_sampling` (else 1), the loss of a token is

    w m l(log pi, log pi_old, A) + coefficient KL(pi || reference) - coefficient H.

    Tokens outside `response_mask` get gradient 0, whatever stands there.

    Args:
        batch: Rows of a batch that `prepare` returned.
        logprobs: [B, R] float32, of the current policy, with gradient.
        config: The settings.
        entropy: [B, R] float32, of the current policy, with gradient; needed for a bonus, and
            shown if given.
        divergence: [B, R] float32, from the teacher's logits; needed for loss `divergence`.

    Raises:
        AlgorithmError: if the batch lacks a field that the settings need.
    """
    sampling = config.importance_sampling
    mask = batch.response_mask
    # Before all else: NaN times 0 is NaN, in gradients too (decision 23).
    current = logprobs.masked_fill(~mask, 0.0)
    old = _old_logprobs(batch, current, config)
    tokens = PolicyTokens(
        mask=mask,
        logprobs=current,
        old_logprobs=old,
        advantages=batch.need("advantages", f"loss {config.loss}").masked_fill(~mask, 0.0),
        divergence=None if divergence is None else divergence.masked_fill(~mask, 0.0),
    )
    losses, metrics = find_policy_loss(config.loss)(tokens, config)
    log_ratio = (current - old).detach()  # (rows, response), for metrics
    shown = {
        "ratio": bounded_exp(log_ratio),
        "ppo_kl": -log_ratio,
        "approx_kl": bounded_exp(log_ratio) - 1.0 - log_ratio,
        **metrics,
    }

    measured = Means.from_tokens({}, mask)
    if sampling.ratio_to == "proximal" or sampling.weights != "none" or sampling.mask != "none":
        # Decoupled PPO splits pi/mu at the proximal policy: the loss has pi/proximal, this
        # has proximal/mu.
        trainers = old if sampling.ratio_to == "proximal" else current.detach()
        sampled = batch.need("behaviour_logprobs", "importance sampling")
        to_behaviour = (trainers - sampled).masked_fill(~mask, 0.0)
        measured = mismatch(to_behaviour, mask)
        if sampling.weights != "none":
            weights = importance_weights(to_behaviour, mask, sampling)
            losses = losses * weights
            shown["rollout_corr/rollout_is_mean"] = weights
        if sampling.mask != "none":
            sampling_mask = importance_mask(to_behaviour, mask, sampling)
            # The denominator keeps these tokens, as IcePop is published (decision 23).
            losses = losses.masked_fill(~sampling_mask, 0.0)
            shown["rollout_corr/rollout_rs_masked_fraction"] = (mask & ~sampling_mask).float()
    shown["pg_loss"] = losses

    if config.kl.coefficient and config.kl.where == "loss":
        reference = batch.need("reference_logprobs", "the KL penalty").masked_fill(~mask, 0.0)
        penalty = kl_estimate(current, reference, config.kl.estimator)
        if config.kl.weighted:
            # With gradient: it is this factor that makes the gradient of k1 and k3 that of the KL.
            penalty = penalty * bounded_exp(current - old)
        losses = losses + config.kl.coefficient * penalty
        shown["kl_loss"] = penalty
    if entropy is not None:
        entropy = entropy.masked_fill(~mask, 0.0)
        shown["entropy"] = entropy
    if config.entropy_coefficient:
        if entropy is None:
            raise ValueError("entropy_coefficient needs the entropy of each token")
        losses = losses - config.entropy_coefficient * entropy
    return Update(
        loss_sum(losses, mask, config),
        loss_denominator(mask, config),
        Means.from_tokens(shown, mask) + measured,
    )


def value_update(batch: Batch, values: Tensor, config: AlgorithmConfig) -> Update:
    """Return the critic's loss on a part of a prepared batch.

    Source: clipped value loss of PPO's implementations (arXiv 2005.12729, section 2;
    `compute_value_loss` of veRL), with V_old the batch's `values` and G its `returns`:

    l = max((V - G)^2, (clip(V, V_old - e, V_old + e) - G)^2) / 2.

    Args:
        batch: Rows of a batch that `prepare` returned.
        values: [B, R] float32, of the current critic, with gradient.
        config: The settings, of which `critic.clip` is e.
    """
    mask = batch.response_mask
    current = values.masked_fill(~mask, 0.0)
    targets = batch.need("returns", "the critic's loss").masked_fill(~mask, 0.0)
    losses = (current - targets).square()
    clipped = losses
    if (bound := config.critic.clip) is not None:
        old = batch.need("values", "the critic's loss").masked_fill(~mask, 0.0)
        near = torch.minimum(torch.maximum(current, old - bound), old + bound)
        clipped = (near - targets).square()
    shown = {"vf_clipfrac": (clipped > losses).float()}
    losses = torch.maximum(losses, clipped) / 2
    shown |= {"vf_loss": losses, "vpred_mean": current}
    return Update(
        loss_sum(losses, mask, config),
        loss_denominator(mask, config),
        Means.from_tokens(shown, mask),
    )


def _old_logprobs(batch: Batch, current: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return the log-probabilities of the ratio's denominator; a loss without one needs none."""
    name = f"{config.importance_sampling.ratio_to}_logprobs"
    if config.loss in {"supervised", "divergence"} and getattr(batch, name) is None:
        # The ratio of metrics is 1 then; no pass is spent on what no loss reads.
        return current.detach()
    return batch.need(name, f"loss {config.loss}").masked_fill(~batch.response_mask, 0.0)
