"""Advantages, losses and corrections give veRL's numbers and gradients."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.batches import make_batch, near
from tests.verl.conftest import speak_to_verl
from trinity_workers.algorithms.importance_sampling import (
    importance_mask,
    importance_weights,
    mismatch,
)
from trinity_workers.algorithms.kl import kl_estimate
from trinity_workers.algorithms.logits import token_statistics
from trinity_workers.algorithms.prepare import prepare
from trinity_workers.algorithms.rules import read_settings
from trinity_workers.algorithms.settings import ImportanceSamplingConfig
from trinity_workers.algorithms.update import policy_update, value_update

pytestmark = pytest.mark.filterwarnings("default")  # veRL's and Ray's

GROUPS = [3, 3, 3, 8, 8, 8]
NORMALISATIONS = {
    "token-mean": "token-mean",
    "sequence-mean": "seq-mean-token-mean",
    "sequence-mean-token-sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}


@pytest.fixture(scope="module")
def verl():
    speak_to_verl()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl.utils.torch_functional as functional
        from verl.trainer.ppo import core_algos, rollout_corr_helper
        from verl.workers.config import ActorConfig

    def actor(**clips):
        return ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_mini_batch_size=4,
            ppo_micro_batch_size_per_gpu=1,
            **clips,
        )

    return SimpleNamespace(
        core=core_algos, corrections=rollout_corr_helper, functional=functional, actor=actor
    )


@pytest.fixture(params=[False, True], ids=["one-turn", "several-turns"])
def batch(request):
    made = make_batch(
        [3, 1, 4, 2, 5, 2], groups=GROUPS, holes=request.param, seed=5, token_rewards=None
    )
    return replace(made, rewards=torch.tensor([1.0, 0.0, 2.0, 0.5, 0.5, 3.0]))


def verls_advantages(verl, name, batch, gamma=1.0, **more):
    rewards = prepare(batch, read_settings({})).batch.token_rewards
    mask = batch.response_mask.float()
    config = SimpleNamespace(gamma=gamma)
    estimate = verl.core.get_adv_estimator_fn(name)
    import numpy as np

    if name == "gae":
        return estimate(rewards, batch.values, mask, gamma=gamma, **more)
    return estimate(rewards.clone(), mask, index=np.array(GROUPS), config=config, **more)


@pytest.mark.parametrize(
    ("settings", "name", "more"),
    [
        ({"deviation": "sample", "deviation_epsilon": 1e-6}, "grpo", {}),
        ({"preset": "dr_grpo"}, "grpo", {"norm_adv_by_std_in_grpo": False}),
        ({"preset": "rloo"}, "rloo", {}),
        (
            {"preset": "reinforce++", "gamma": 0.9, "deviation": "sample"},
            "reinforce_plus_plus",
            {"gamma": 0.9},
        ),
        (
            {"preset": "reinforce++-baseline", "deviation": "sample"},
            "reinforce_plus_plus_baseline",
            {},
        ),
        (
            {"preset": "ppo", "gamma": 0.9, "deviation": "sample"},
            "gae",
            {"gamma": 0.9, "lam": 0.95},
        ),
    ],
)
def test_advantages(verl, batch, settings, name, more):
    expected, returns = verls_advantages(verl, name, batch, **more)
    prepared = prepare(batch, read_settings(settings)).batch
    mask = batch.response_mask
    near(prepared.advantages[mask], expected[mask], 1e-5)
    if prepared.returns is not None:
        near(prepared.returns[mask], returns[mask])


def gradients(loss, x):
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize(
    ("settings", "name", "clips"),
    [
        (
            {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2},
            "vanilla",
            {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.2},
        ),
        (
            {"loss": "cispo", "clip_low": 0.5, "clip_high": 0.4},
            "cispo",
            {"clip_ratio_low": 0.5, "clip_ratio_high": 0.4},
        ),
        (
            {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.3},
            "gspo",
            {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3},
        ),
    ],
)
def test_policy_losses(verl, batch, settings, name, clips):
    # Another normalisation of gspo is refused.
    for normalisation in ["sequence-mean"] if name == "gspo" else NORMALISATIONS:
        check_policy_loss(verl, batch, normalisation, settings, name, clips)


def normalised(normalisation, batch):
    """Return the settings of a normalisation; the constant one divides by the longest response."""
    length = {"normalisation_length": batch.response_width} if normalisation == "constant" else {}
    return {"normalisation": normalisation, **length}


def check_policy_loss(verl, batch, normalisation, settings, name, clips):
    settings = {**settings, **normalised(normalisation, batch)}
    x = batch.logprobs.clone().requires_grad_()
    update = policy_update(batch, x, read_settings(settings))
    mask = batch.response_mask.float()
    expected, metrics = verl.core.get_policy_loss_fn(name)(
        old_log_prob=batch.behaviour_logprobs,
        log_prob=x,
        advantages=batch.advantages,
        response_mask=mask,
        loss_agg_mode=NORMALISATIONS[normalisation],
        config=verl.actor(clip_ratio=0.2, **clips),
    )
    loss = update.loss(update.denominator)
    near(loss, expected)
    near(gradients(loss, x), gradients(expected, x))
    shown = update.metrics.values()
    for short in ("pg_clipfrac", "ppo_kl"):
        assert shown[short] == pytest.approx(metrics[f"actor/{short}"], abs=1e-6)
    if name == "vanilla":
        assert shown["pg_clipfrac_lower"] == pytest.approx(metrics["actor/pg_clipfrac_lower"])
        assert shown["pg_clipfrac_lower"] > 0 and shown["pg_clipfrac"] > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_within_the_decoupled_loss(verl, batch, level):
    sampling = {"ratio_to": "proximal", "weights": level, "cap": 1.5}
    mask = batch.response_mask.float()
    log_ratio = (batch.proximal_logprobs - batch.behaviour_logprobs) * mask
    weights, _ = verl.corrections.compute_rollout_correction_weights(
        log_ratio, mask, rollout_is=level, rollout_is_threshold=1.5
    )
    config = ImportanceSamplingConfig(weights=level, cap=1.5)
    actual_weights = importance_weights(log_ratio, batch.response_mask, config)
    near(actual_weights[batch.response_mask], weights[batch.response_mask])
    x = batch.logprobs.clone().requires_grad_()
    expected, _ = verl.core.get_policy_loss_fn("vanilla")(
        batch.proximal_logprobs,
        x,
        batch.advantages,
        mask,
        config=verl.actor(clip_ratio=0.2, clip_ratio_c=1e9),
        rollout_is_weights=weights,
    )
    update = policy_update(batch, x, read_settings({"importance_sampling": sampling}))
    near(update.loss(update.denominator), expected)
    near(gradients(update.loss(update.denominator), x), gradients(expected, x))
    if level == "token":
        shown = update.metrics.values()["rollout_corr/rollout_is_mean"]
        assert shown == pytest.approx(float((weights * mask).sum() / mask.sum()), abs=1e-6)


def test_icepop(verl, batch):
    mask = batch.response_mask.float()
    log_ratio = (batch.proximal_logprobs - batch.behaviour_logprobs) * mask
    weights, _ = verl.corrections.compute_rollout_correction_weights(
        log_ratio, mask, rollout_is="token", rollout_is_threshold="0.7_1.4"
    )
    config = ImportanceSamplingConfig(
        weights="token", cap=None, mask="icepop", mask_low=0.7, mask_high=1.4
    )
    mask_kept = importance_mask(log_ratio, batch.response_mask, config)
    actual_weights = importance_weights(log_ratio, batch.response_mask, config) * mask_kept
    assert 0 < int(mask_kept.sum()) < batch.token_count
    near(actual_weights, weights * mask)


@pytest.mark.parametrize(
    ("mask", "option"), [("geometric", "seq_mean_k1"), ("sequence", "seq_sum_k1")]
)
def test_masks_of_sequences(verl, batch, mask, option):
    tokens = batch.response_mask.float()
    log_ratio = (batch.proximal_logprobs - batch.behaviour_logprobs) * tokens
    # veRL's k1 is mu/pi: the bounds 0.8 to 1.3 of it are 1/1.3 to 1/0.8 of pi/mu.
    expected, _ = verl.corrections.compute_rollout_rejection_mask(
        log_ratio, tokens, option, "0.8_1.3"
    )
    config = ImportanceSamplingConfig(mask=mask, mask_low=1 / 1.3, mask_high=1 / 0.8)
    actual_mask = importance_mask(log_ratio, batch.response_mask, config)
    assert actual_mask.tolist() == expected.bool().tolist()
    assert 0 < int(actual_mask.sum()) < batch.token_count


def test_the_mismatch_of_engine_and_trainer(verl, batch):
    mask = batch.response_mask
    log_ratio = (batch.proximal_logprobs - batch.behaviour_logprobs) * mask
    expected = verl.corrections.compute_offpolicy_metrics(
        batch.proximal_logprobs, batch.behaviour_logprobs, mask.float()
    )
    for name, value in mismatch(log_ratio, mask).values().items():
        assert value == pytest.approx(expected[name.removeprefix("rollout_corr/")], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates(verl, batch, estimator):
    x = batch.logprobs.clone().requires_grad_()
    expected = verl.core.kl_penalty(x, batch.reference_logprobs, estimator)
    estimate = kl_estimate(x, batch.reference_logprobs, estimator)
    near(estimate, expected)
    near(gradients(estimate.sum(), x), gradients(expected.sum(), x))


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_the_value_loss(verl, batch, normalisation):
    x = (batch.values + batch.logprobs / 3).detach().requires_grad_()
    config = read_settings({"preset": "ppo", **normalised(normalisation, batch)})
    update = value_update(batch, x, config)
    expected, clipped = verl.core.compute_value_loss(
        x,
        batch.returns,
        batch.values,
        batch.response_mask.float(),
        cliprange_value=0.2,
        loss_agg_mode=NORMALISATIONS[normalisation],
    )
    near(update.loss(update.denominator), expected)
    near(gradients(update.loss(update.denominator), x), gradients(expected, x))
    assert update.metrics.values()["vf_clipfrac"] == pytest.approx(float(clipped), abs=1e-6)


def test_log_probabilities_and_entropies(verl):
    lot = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 17, generator=lot)
    tokens = torch.randint(0, 17, (2, 3), generator=lot)
    statistics = token_statistics(logits, tokens, entropy=True, chunk=2)
    near(statistics.logprobs, verl.functional.logprobs_from_logits(logits, tokens))
    near(statistics.entropy, verl.functional.entropy_from_logits(logits))
