"""Claims about advantages, against numbers worked out by hand."""

from __future__ import annotations

from math import sqrt

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")

from tests.support.batches import make_batch, near  # noqa: E402
from trinity_workers.algorithms.errors import FieldMissing, LoneSample  # noqa: E402
from trinity_workers.algorithms.prepare import prepare  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402


def advantages(batch, **settings):
    return prepare(batch, read_settings(settings)).batch.advantages


def two_groups(**given):
    """Rewards 1, 0, 0, 1 | 3, 1 and responses of 1, 2, 1, 1 | 2, 1 tokens."""
    return make_batch(
        [1, 2, 1, 1, 2, 1],
        groups=[7, 7, 7, 7, 9, 9],
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0]),
        token_rewards=None,
        **given,
    )


def test_grpo_divides_by_the_deviation_of_the_group():
    # Group 7: mean 1/2, squares 4 * 1/4, population deviation 1/2: +-1.
    # Group 9: mean 2, squares 2 * 1, population deviation 1: +-1.
    near(
        advantages(two_groups(), deviation_epsilon=0.0),
        [[1, 0], [-1, -1], [-1, 0], [1, 0], [1, 1], [-1, 0]],
    )


def test_grpo_adds_an_epsilon_to_the_deviation_of_the_group():
    # Group 7: 1/2 / (1/2 + 1/4). Group 9: 1 / (1 + 1/4). By default 1e-4, as in TRL.
    a, b = 2 / 3, 4 / 5
    near(
        advantages(two_groups(), deviation_epsilon=0.25),
        [[a, 0], [-a, -a], [-a, 0], [a, 0], [b, b], [-b, 0]],
    )
    assert advantages(two_groups())[0, 0] == pytest.approx(0.5 / 0.5001)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "reinforce++-baseline", "rloo"])
@pytest.mark.parametrize("reward", [0.0, 0.5, 1000.0])
def test_noise_of_rounding_in_equal_rewards_is_not_learned_from(name, reward):
    noise = 1e-7 * max(reward, 1.0)
    rewards = torch.tensor([reward, reward + noise, reward, reward], dtype=torch.float64)
    batch = make_batch([1, 2, 1, 1], groups=[3] * 4, rewards=rewards, token_rewards=None)
    assert not advantages(batch, preset=name).any()
    assert prepare(batch, read_settings({})).metrics.values()["zero_variance"] == 1.0


def test_small_differences_of_rewards_have_small_advantages():
    rewards = torch.tensor([0.5, 0.5 + 1e-5, 0.5, 0.5], dtype=torch.float64)
    batch = make_batch([1, 2, 1, 1], groups=[3] * 4, rewards=rewards, token_rewards=None)
    largest = advantages(batch).abs().max()
    assert 0 < largest < 0.1


def test_grpo_with_the_samples_deviation_divides_by_one_less():
    # Group 7: sqrt(1/3), so 1/2 / sqrt(1/3) = sqrt(3)/2. Group 9: sqrt(2), so 1/sqrt(2).
    a, b = sqrt(3) / 2, 1 / sqrt(2)
    near(
        advantages(two_groups(), deviation="sample", deviation_epsilon=0.0),
        [[a, 0], [-a, -a], [-a, 0], [a, 0], [b, b], [-b, 0]],
    )


def test_dr_grpo_leaves_the_deviation_out():
    near(
        advantages(two_groups(), preset="dr_grpo"),
        [[0.5, 0], [-0.5, -0.5], [-0.5, 0], [0.5, 0], [1, 1], [-1, 0]],
    )


def test_grpo_with_the_batchs_deviation_divides_all_groups_by_it():
    # All rewards: mean 1, squares 0 + 1 + 1 + 0 + 4 + 0 = 6, population deviation 1.
    near(
        advantages(two_groups(), scale="batch"),
        [[0.5, 0], [-0.5, -0.5], [-0.5, 0], [0.5, 0], [1, 1], [-1, 0]],
    )


def test_rloo_compares_with_the_other_samples():
    # Group 7: 1 - 1/3 = 2/3 and 0 - 2/3 = -2/3. Group 9: 3 - 1 = 2 and 1 - 3 = -2.
    a = 2 / 3
    near(
        advantages(two_groups(), preset="rloo"),
        [[a, 0], [-a, -a], [-a, 0], [a, 0], [2, 2], [-2, 0]],
    )


def test_rloo_refuses_a_group_of_one_by_its_number():
    batch = make_batch([1, 1, 1], groups=[4, 4, 6])
    with raises(LoneSample, group=6):
        advantages(batch, advantage="rloo")


def test_reinforce_plus_plus_baseline_normalises_the_centred_rewards_over_all_tokens():
    # Centred: 1/2, -1/2 (2 tokens), -1/2, 1/2 | 1 (2 tokens), -1. Tokens: 8.
    # Sum 1/2 - 1 - 1/2 + 1/2 + 2 - 1 = 1/2, mean 1/16.
    # Squares 1/4 + 2/4 + 1/4 + 1/4 + 2 + 1 = 17/4, variance 17/32 - 1/256 = 135/256.
    m, d = 1 / 16, sqrt(135) / 16
    expected = [
        [(0.5 - m) / d, 0],
        [(-0.5 - m) / d] * 2,
        [(-0.5 - m) / d, 0],
        [(0.5 - m) / d, 0],
        [(1 - m) / d] * 2,
        [(-1 - m) / d, 0],
    ]
    near(advantages(two_groups(), preset="reinforce++-baseline"), expected)


def test_reinforce_plus_plus_sums_what_follows_and_normalises_over_all_tokens():
    # One row of 2 tokens with reward 2 at the end, one of 1 token with reward -1, gamma 1/2.
    # Returns: 1, 2, -1. Mean 2/3, variance (1 + 4 + 1)/3 - 4/9 = 14/9.
    batch = make_batch([2, 1], groups=[0, 1], rewards=torch.tensor([2.0, -1.0]), token_rewards=None)
    d = sqrt(14) / 3
    near(
        advantages(batch, preset="reinforce++", gamma=0.5),
        [[(1 - 2 / 3) / d, (2 - 2 / 3) / d], [(-1 - 2 / 3) / d, 0]],
    )
    near(advantages(batch, preset="reinforce++", gamma=0.5, scale="none"), [[1, 2], [-1, 0]])


def test_a_kl_penalty_in_the_reward_falls_on_the_token_and_those_before_it():
    # k1 of the tokens: -1 + 2 = 1 and -1.5 + 1.5 = 0; coefficient 1/10; reward 2.
    # Rewards of tokens: -0.1 and 2. Returns: 1.9 and 2.
    batch = make_batch(
        [2],
        rewards=torch.tensor([2.0]),
        token_rewards=None,
        behaviour_logprobs=torch.tensor([[-1.0, -1.5]]),
        reference_logprobs=torch.tensor([[-2.0, -1.5]]),
    )
    settings = {"preset": "reinforce++", "scale": "none", "kl": {"coefficient": 0.1}}
    near(advantages(batch, **settings), [[1.9, 2.0]])
    prepared = prepare(batch, read_settings(settings))
    assert prepared.metrics.values()["reward_kl"] == pytest.approx(1.0)


def test_gae_is_the_decayed_sum_of_the_critics_errors():
    # gamma 1/2, lambda 1/2, rewards 0, 0, 4 and values 1, 2, 3.
    # Errors: 0 + 2/2 - 1 = 0; 0 + 3/2 - 2 = -1/2; 4 - 3 = 1.
    # Advantages: 1; -1/2 + 1/4 = -1/4; 0 - 1/16 = -1/16. Returns: 15/16, 7/4, 4.
    batch = make_batch(
        [3],
        rewards=torch.tensor([4.0]),
        token_rewards=None,
        values=torch.tensor([[1.0, 2.0, 3.0]]),
    )
    settings = {"preset": "ppo", "gamma": 0.5, "gae_lambda": 0.5, "scale": "none"}
    prepared = prepare(batch, read_settings(settings)).batch
    near(prepared.advantages, [[-1 / 16, -1 / 4, 1]])
    near(prepared.returns, [[15 / 16, 7 / 4, 4]])
    # Normalised: mean 11/48, and the returns as they were.
    raw = torch.tensor([-1 / 16, -1 / 4, 1.0], dtype=torch.float64)
    whitened = prepare(batch, read_settings(settings | {"scale": "batch"})).batch
    near(whitened.advantages, [((raw - raw.mean()) / raw.std(correction=0)).tolist()])
    near(whitened.returns, prepared.returns)


@pytest.mark.parametrize(
    "preset",
    [{"preset": "ppo", "scale": "none"}, {"preset": "reinforce++", "scale": "none", "gamma": 0.5}],
)
def test_tokens_of_the_environment_are_passed_over(preset):
    """Two tokens of the policy around one of the environment are as two that follow each other."""
    values = torch.tensor([[1.0, 99.0, 3.0]])
    given = {"rewards": torch.tensor([4.0]), "token_rewards": None}
    apart = make_batch([3], values=values, **given)
    mask = torch.tensor([[True, False, True]])
    from dataclasses import replace

    apart = replace(apart, response_mask=mask)
    together = make_batch([2], values=values[:, [0, 2]], **given)
    prepared = prepare(apart, read_settings(preset)).batch
    other = prepare(together, read_settings(preset)).batch
    near(prepared.advantages[:, [0, 2]], other.advantages)
    assert prepared.advantages[0, 1] == 0.0


def test_rewards_of_single_tokens_are_taken_if_the_batch_has_them():
    batch = make_batch([2, 1], groups=[0, 0], token_rewards=torch.tensor([[1.0, 2.0], [5.0, 0.0]]))
    near(advantages(batch, scale="none"), [[-1, -1], [1, 0]])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "reinforce++-baseline", "rloo"])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(name):
    # 0.1 thrice: the mean of floats is not 0.1, and a division would blow the rest up.
    batch = make_batch(
        [1, 2, 1],
        groups=[3, 3, 3],
        rewards=torch.full((3,), 0.1, dtype=torch.float64),
        token_rewards=None,
    )
    assert not advantages(batch, preset=name).any()


def test_a_teachers_advantage_is_the_negative_divergence_of_each_token():
    batch = make_batch(
        [2],
        teacher_logprobs=torch.tensor([[-1.0, -3.0]]),
        behaviour_logprobs=torch.tensor([[-2.0, -1.0]]),
    )
    near(advantages(batch, preset="distillation"), [[1.0, -2.0]])


@pytest.mark.parametrize(
    ("settings", "field", "purpose"),
    [
        ({"preset": "ppo"}, "values", "advantage gae"),
        ({"preset": "distillation"}, "teacher_logprobs", "advantage teacher"),
        (
            {"preset": "reinforce++", "kl": {"coefficient": 0.1}},
            "reference_logprobs",
            "the KL penalty",
        ),
    ],
)
def test_a_missing_field_is_named(settings, field, purpose):
    with raises(FieldMissing, purpose=purpose, field=field):
        advantages(make_batch([2, 1], **{field: None}), **settings)


ALL = ["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline", "ppo", "distillation"]


def chosen(preset):
    name, _, scale = preset.partition("/")
    return read_settings({"preset": name} | ({"scale": scale} if scale else {}))


@pytest.mark.parametrize("preset", [*ALL, "grpo/batch"])
def test_advantages_follow_their_rows_into_any_order_and_ignore_padding(preset):
    batch = make_batch([3, 1, 4, 2, 2, 5], groups=[1, 1, 1, 2, 2, 2], holes=True)
    settings = chosen(preset)
    expected = prepare(batch, settings).batch
    order = [4, 0, 5, 2, 3, 1]
    near(prepare(batch.reorder(order), settings).batch.advantages, expected.advantages[order])
    padded = prepare(batch.padded(4), settings).batch
    near(padded.advantages[:6], expected.advantages)
    assert not padded.advantages[6:].any()
    # More columns: another response in the batch is longer.
    wide = prepare(batch.widened(9, 8), settings).batch
    near(wide.advantages[:, :5], expected.advantages)


@pytest.mark.parametrize("preset", [*ALL, "grpo/batch"])
def test_ranks_with_whole_groups_estimate_the_advantages_of_the_whole(preset):
    """Two ranks, whose sums are added as an all-reduce adds them."""
    settings = chosen(preset)
    batch = make_batch([3, 1, 4, 2, 2, 5], groups=[1, 1, 1, 2, 2, 2], holes=True)
    expected = prepare(batch, settings).batch.advantages
    advantages = on_ranks([batch.rows(0, 3), batch.rows(3, 6)], settings)
    near(torch.cat(advantages), expected)


def on_ranks(shares, settings):
    """Prepare every share in a thread of its own; a reduction waits for all of them."""
    import threading

    meeting = threading.Barrier(len(shares), timeout=60)
    sums: dict[int, torch.Tensor] = {}
    advantages: dict[int, torch.Tensor] = {}

    def rank(number):
        def reduce(tensor):
            sums[number] = tensor
            meeting.wait()
            total = sum(sums.values())
            meeting.wait()
            return total

        advantages[number] = prepare(shares[number], settings, reduce).batch.advantages

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [advantages[number] for number in range(len(shares))]
