"""Claims about importance sampling, filters and overlong responses, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")

from tests.support.batches import make_batch, near  # noqa: E402
from tests.support.rollout_messages import experience  # noqa: E402
from trinity_schemas import Experience  # noqa: E402
from trinity_workers.algorithms.errors import (  # noqa: E402
    FieldMissing,
    LengthMissing,
    RewardPartMissing,
)
from trinity_workers.algorithms.filters import is_informative  # noqa: E402
from trinity_workers.algorithms.importance_sampling import (  # noqa: E402
    importance_mask,
    importance_weights,
    mismatch,
)
from trinity_workers.algorithms.prepare import overlong_penalty, prepare  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.algorithms.settings import (  # noqa: E402
    FiltersConfig,
    ImportanceSamplingConfig,
    OverlongConfig,
)
from trinity_workers.algorithms.update import policy_update  # noqa: E402

HALF_AND_FOUR = [[0.5, 4.0], [2.0, 3.0]]
"""Ratios of the proximal to the behaviour probability, of two responses."""


def sampled_by_another(ratios, **given):
    """A batch whose proximal policy has these ratios to the behaviour policy, and A = 1."""
    ratio = torch.tensor(ratios, dtype=torch.float64)
    behaviour = torch.full_like(ratio, -3.0)
    given = {"advantages": torch.ones_like(ratio)} | given
    return make_batch(
        [ratio.shape[1]] * ratio.shape[0],
        behaviour_logprobs=behaviour,
        proximal_logprobs=behaviour + ratio.log(),
        **given,
    )


def pushed(batch, sampling, logprobs=None, **chosen):
    """How much each token is pushed: the negative gradient of the loss sum, and the update."""
    start = batch.proximal_logprobs if logprobs is None else logprobs
    x = start.clone().requires_grad_()
    config = read_settings({"importance_sampling": sampling, **chosen})
    update = policy_update(batch, x, config)
    return -torch.autograd.grad(update.loss_sum, x)[0], update


def test_weights_of_tokens_are_their_ratios_truncated_at_the_cap():
    batch = sampled_by_another(HALF_AND_FOUR)
    weights, update = pushed(batch, {"ratio_to": "proximal", "weights": "token"})
    near(weights, [[0.5, 2.0], [2.0, 2.0]])
    assert update.metrics.values()["rollout_corr/rollout_is_mean"] == 6.5 / 4
    uncapped, _ = pushed(batch, {"ratio_to": "proximal", "weights": "token", "cap": None})
    near(uncapped, HALF_AND_FOUR)


def test_weights_and_masks_are_constants_to_the_gradient():
    config = ImportanceSamplingConfig(weights="token", cap=None, mask="icepop")
    log_ratio = torch.zeros(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert not importance_weights(log_ratio, mask, config).requires_grad
    assert not importance_mask(log_ratio, mask, config).requires_grad
    assert not mismatch(log_ratio, mask).sums.requires_grad


def test_weights_of_sequences_are_the_products_of_their_ratios_truncated():
    # 0.5 * 4 = 2 and 2 * 3 = 6, at most 5.
    batch = sampled_by_another(HALF_AND_FOUR)
    weights, _ = pushed(batch, {"ratio_to": "proximal", "weights": "sequence", "cap": 5.0})
    near(weights, [[2.0, 2.0], [5.0, 5.0]])


def test_the_decoupled_ratio_is_clipped_around_the_proximal_policy():
    # Current/proximal 1.5: clipped at 1.2, so no push. Current/behaviour is 0.75 and 6.
    batch = sampled_by_another([[0.5, 4.0]])
    current = batch.proximal_logprobs + log(1.5)
    weights, update = pushed(batch, {"ratio_to": "proximal", "weights": "token"}, current)
    near(weights, [[0.0, 0.0]])
    near(update.loss_sum, -(0.5 * 1.2 + 2.0 * 1.2))
    coupled, _ = pushed(batch, {}, current)
    near(coupled, [[0.75, 0.0]])


def test_icepop_weighs_tokens_within_its_bounds_and_drops_others():
    # Bounds 0.6 to 3.5: 0.5 and 4 are dropped, 2 and 3 weigh as they are. All four still count.
    batch = sampled_by_another(HALF_AND_FOUR)
    icepop = {"mask": "icepop", "mask_low": 0.6, "mask_high": 3.5, "cap": None}
    weights, update = pushed(batch, {"ratio_to": "proximal", "weights": "token", **icepop})
    near(weights, [[0.0, 0.0], [2.0, 3.0]])
    assert float(update.denominator) == 4.0
    assert update.metrics.values()["rollout_corr/rollout_rs_masked_fraction"] == 0.5


@pytest.mark.parametrize(
    ("mask", "low", "high", "expected"),
    [
        # Geometric means: sqrt(2) = 1.41 and sqrt(6) = 2.45. Products: 2 and 6.
        ("geometric", 1.4, 1.5, [True, False]),
        ("geometric", 1.0, 2.5, [True, True]),
        ("geometric", 1.5, 2.5, [False, True]),
        ("sequence", 1.4, 1.5, [False, False]),
        ("sequence", 1.9, 6.1, [True, True]),
        ("sequence", 3.0, 6.1, [False, True]),
    ],
)
def test_masks_of_sequences_keep_or_drop_whole_responses(mask, low, high, expected):
    batch = sampled_by_another(HALF_AND_FOUR)
    weights, _ = pushed(
        batch, {"ratio_to": "proximal", "mask": mask, "mask_low": low, "mask_high": high}
    )
    assert weights.bool().tolist() == [[keep, keep] for keep in expected]


def test_without_a_proximal_policy_a_mask_judges_the_current_one():
    batch = sampled_by_another([[1.0, 1.0]])
    current = batch.behaviour_logprobs + torch.tensor([[log(8.0), 0.0]], dtype=torch.float64)
    batch = replace(batch, advantages=-batch.advantages, proximal_logprobs=None)
    weights, _ = pushed(batch, {"mask": "icepop"}, current)
    near(weights, [[0.0, -1.0]])


def test_the_mismatch_of_engine_and_trainer_is_measured_in_verls_words():
    batch = sampled_by_another([[2.0, 0.5]])
    _, update = pushed(batch, {"ratio_to": "proximal"})
    metrics = update.metrics.values()
    assert metrics["rollout_corr/kl"] == pytest.approx(0.0)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((2 + 0.5) / 2 - 1)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((4 + 0.25) / 2 - 1)


def test_a_correction_needs_the_log_probabilities_of_the_engine():
    batch = replace(sampled_by_another([[1.0]]), behaviour_logprobs=None)
    with raises(FieldMissing, purpose="importance sampling", field="behaviour_logprobs"):
        pushed(batch, {"ratio_to": "proximal"})


# --- filters -------------------------------------------------------------------------------------


def group(*rewards, **parts):
    made = []
    for index, reward in enumerate(rewards):
        sample = experience(sample=index % 2)
        values = {name: getattr(sample, name) for name in sample.__struct_fields__}
        named = {name: part[index] for name, part in parts.items()}
        made.append(Experience(**values | {"reward": reward, "reward_parts": named}))
    return made


def test_dynamic_sampling_drops_groups_of_equal_rewards():
    drops = FiltersConfig(zero_variance="resample")
    assert is_informative(group(0.0, 1.0, 0.0), drops)
    assert not is_informative(group(1.0, 1.0), drops)
    assert not is_informative(group(0.0, 0.0), drops)
    assert not is_informative(group(0.5, 0.5 + 1e-7), drops)
    assert not is_informative(group(1000.0, 1000.0001), drops)
    assert is_informative(group(0.5, 0.5 + 1e-4), drops)
    assert is_informative(group(1.0, 1.0), FiltersConfig())


def test_dynamic_sampling_compares_a_part_of_the_reward_if_one_is_named():
    by_right = FiltersConfig(zero_variance="resample", part="right")
    assert not is_informative(group(0.9, 0.8, right=[1.0, 1.0]), by_right)
    assert is_informative(group(0.5, 0.5, right=[1.0, 0.0]), by_right)
    with raises(RewardPartMissing, parts=("wrong",)):
        is_informative(group(0.5, 0.5, wrong=[1.0, 0.0]), by_right)


def test_a_masked_group_without_variance_counts_for_nothing():
    batch = make_batch(
        [2, 1, 3, 1],
        groups=[5, 5, 8, 8],
        rewards=torch.tensor([1.0, 1.0, 0.0, 1.0]),
        token_rewards=None,
    )
    masked = prepare(batch, read_settings({"filters": {"zero_variance": "mask"}}))
    assert masked.batch.response_mask.sum(dim=-1).tolist() == [0, 0, 3, 1]
    assert masked.metrics.values()["zero_variance"] == 0.5
    assert prepare(batch, read_settings({})).batch.token_count == 7


def test_overlong_rows_count_in_their_group_and_are_not_trained_on():
    batch = make_batch(
        [2, 1],
        groups=[5, 5],
        rewards=torch.tensor([1.0, 0.0]),
        finished=torch.tensor([True, False]),
        token_rewards=None,
    )
    prepared = prepare(batch, read_settings({"overlong": {"mask": True}, "deviation_epsilon": 0.0}))
    near(prepared.batch.advantages, [[1.0, 1.0], [0.0, 0.0]])
    assert prepared.batch.response_mask.sum(dim=-1).tolist() == [2, 0]
    assert prepared.metrics.values()["overlong"] == 0.5


def test_the_penalty_grows_over_the_last_share_of_the_limit():
    # L = 10, C = 4: 0 up to 6 tokens, -1/4 at 7, -3/4 at 9, -1 at 10 and beyond.
    batch = make_batch([6, 7, 9, 10, 12])
    config = OverlongConfig(buffer=0.4, limit=10)
    near(overlong_penalty(batch, config), [0, -0.25, -0.75, -1, -1])
    near(overlong_penalty(batch, replace_penalty(config, 0.5)), [0, -0.125, -0.375, -0.5, -0.5])
    assert not overlong_penalty(batch, OverlongConfig(limit=10)).any()
    with raises(LengthMissing, setting="overlong.limit"):
        overlong_penalty(batch, OverlongConfig(buffer=0.4))


def replace_penalty(config, penalty):
    return OverlongConfig(buffer=config.buffer, limit=config.limit, penalty=penalty)


def test_the_penalty_is_added_to_the_reward_before_groups_are_compared():
    # Rewards 1 and 1, of 10 and 1 tokens: 0 and 1 after the penalty, so advantages -1 and 1.
    batch = make_batch([10, 1], groups=[5, 5], rewards=torch.ones(2), token_rewards=None)
    config = read_settings({"preset": "dapo", "deviation_epsilon": 0.0}).with_limit(10)
    prepared = prepare(batch, config)
    near(prepared.batch.advantages[:, 0], [-1.0, 1.0])
    assert prepared.metrics.values()["overlong_penalty"] == -0.5
    assert prepared.metrics.values()["score"] == 1.0
    assert prepared.metrics.values()["response_length"] == 5.5
