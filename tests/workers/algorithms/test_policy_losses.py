"""Claims about the policy's losses, against numbers worked out by hand and finite differences."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.properties.generated import examples  # noqa: E402
from tests.support.batches import make_batch, near  # noqa: E402
from trinity_workers.algorithms.aggregation import Means  # noqa: E402
from trinity_workers.algorithms.errors import FieldMissing, LengthMissing  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.algorithms.update import policy_update, value_update  # noqa: E402


def row(ratios, advantages, **given):
    """A row whose tokens have these ratios of current to behaviour probability; and logprobs."""
    width = len(ratios)
    behaviour = torch.full((1, width), -1.0, dtype=torch.float64)
    current = behaviour + torch.tensor([ratios], dtype=torch.float64).log()
    batch = make_batch(
        [width],
        behaviour_logprobs=behaviour,
        advantages=torch.tensor([advantages], dtype=torch.float64),
        **given,
    )
    return batch, current.requires_grad_()


def loss_of(batch, logprobs, *, denominator=None, **chosen):
    update = policy_update(batch, logprobs, read_settings(chosen))
    return update.loss(update.denominator if denominator is None else denominator)


def gradient_of(batch, logprobs, **chosen):
    (gradient,) = torch.autograd.grad(loss_of(batch, logprobs, **chosen), logprobs)
    return gradient


# --- worked examples -----------------------------------------------------------------------------


def test_ppo_clips_low_and_high_by_bounds_of_their_own():
    # low 0.2 and high 0.28. min(1.5, 1.28) * 2 = 2.56; min(0.5, 0.8) * 2 = 1;
    # A < 0: min(1.5 * -1, 1.28 * -1) = -1.5; min(0.5 * -1, 0.8 * -1) = -0.8.
    # Sum 2.56 + 1 - 1.5 - 0.8 = 1.26, loss -1.26 / 4.
    batch, logprobs = row([1.5, 0.5, 1.5, 0.5], [2.0, 2.0, -1.0, -1.0])
    near(loss_of(batch, logprobs, clip_high=0.28), -1.26 / 4)
    # The first and the last are clipped: no gradient. Of others d/dlogp = -r A / 4.
    near(gradient_of(batch, logprobs, clip_high=0.28), [[0.0, -0.5 * 2 / 4, 1.5 / 4, 0.0]])
    metrics = policy_update(batch, logprobs, read_settings({"clip_high": 0.28})).metrics.values()
    assert metrics["pg_clipfrac"] == 0.5
    assert metrics["ratio"] == pytest.approx(1.0)
    # Mean of -log r: -(log 1.5 + log 0.5) / 2, and of r - 1 - log r: the same, for mean r is 1.
    assert metrics["ppo_kl"] == pytest.approx(-(log(1.5) + log(0.5)) / 2)
    assert metrics["approx_kl"] == pytest.approx(-(log(1.5) + log(0.5)) / 2)
    assert metrics["pg_loss"] == pytest.approx(-1.26 / 4)


def test_dual_clip_bounds_a_negative_advantage_at_a_great_ratio():
    # c = 3: -min(5 * -2, 1.2 * -2) = 10, but at most 3 * 2 = 6. With A > 0 nothing changes: -1.2.
    batch, logprobs = row([5.0, 5.0], [-2.0, 1.0])
    near(loss_of(batch, logprobs, dual_clip=3.0), (6 - 1.2) / 2)
    near(gradient_of(batch, logprobs, dual_clip=3.0), [[0.0, 0.0]])
    near(loss_of(batch, logprobs), (10 - 1.2) / 2)
    metrics = policy_update(batch, logprobs, read_settings({"dual_clip": 3.0})).metrics.values()
    assert metrics["pg_clipfrac_lower"] == 0.5


def test_gspo_clips_the_geometric_mean_of_a_responses_ratios():
    # Ratios 4 and 1: s = 2. Clipped at 1.2: -min(2 A, 1.2 A) is -1.2 for A = 1, and 2 for A = -1.
    batch, logprobs = row([4.0, 1.0], [1.0, 1.0])
    chosen = {"preset": "gspo", "clip_low": 0.2, "clip_high": 0.2}
    near(loss_of(batch, logprobs, **chosen), -1.2)
    near(gradient_of(batch, logprobs, **chosen), [[0.0, 0.0]])
    negative = replace(batch, advantages=-batch.advantages)
    near(loss_of(negative, logprobs, **chosen), 2.0)
    # d s / d logp_t = s / |y|, whatever the token's own ratio.
    near(gradient_of(negative, logprobs, **chosen), [[1.0, 1.0]])


def test_cispo_keeps_the_gradient_of_every_token_and_bounds_its_weight():
    # Ratios 8 and 0.5, at most 5: loss -(5 * 1 * logp_1 + 0.5 * 1 * logp_2) / 2.
    batch, logprobs = row([8.0, 0.5], [1.0, 1.0])
    first, second = -1 + log(8), -1 + log(0.5)
    near(loss_of(batch, logprobs, preset="cispo"), -(5 * first + 0.5 * second) / 2)
    near(gradient_of(batch, logprobs, preset="cispo"), [[-5 / 2, -0.5 / 2]])
    metrics = policy_update(batch, logprobs, read_settings({"preset": "cispo"})).metrics.values()
    assert metrics["pg_clipfrac"] == 0.5


def test_reinforce_and_the_supervised_loss_are_log_probabilities():
    batch, logprobs = row([exp(0.5), exp(-1.0)], [2.0, -3.0])
    # logp: -0.5 and -2. -(2 * -0.5 - 3 * -2) / 2 = -2.5.
    near(loss_of(batch, logprobs, loss="reinforce"), -2.5)
    near(gradient_of(batch, logprobs, loss="reinforce"), [[-1.0, 1.5]])
    near(loss_of(batch, logprobs, preset="supervised"), 1.25)
    near(gradient_of(batch, logprobs, preset="supervised"), [[-0.5, -0.5]])
    bare = replace(batch, behaviour_logprobs=None)
    near(loss_of(bare, logprobs, preset="supervised"), 1.25)


def test_the_loss_divergence_is_what_the_trainer_computed():
    batch, logprobs = row([1.0, 1.0], [0.0, 0.0])
    config = read_settings({"advantage": "none", "loss": "divergence"})
    divergence = torch.tensor([[0.25, 0.75]], requires_grad=True)
    update = policy_update(batch, logprobs, config, divergence=divergence)
    near(update.loss(update.denominator), 0.5)
    with raises(FieldMissing, purpose="loss divergence", field="divergence"):
        policy_update(batch, logprobs, config)


@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [
        # On policy a token's loss is -A. Rows: 1 token of 4, 3 tokens of 1, none.
        ("token-mean", -(4 + 3) / 4),
        ("sequence-mean", -(4 + 1) / 2),
        ("sequence-mean-token-sum", -(4 + 3) / 2),
        ("constant", -(4 + 3) / (2 * 10)),
    ],
)
def test_each_normalisation_divides_by_what_it_says(normalisation, expected):
    batch = make_batch(
        [1, 3, 2],
        advantages=torch.tensor([[4.0, 0, 0], [1, 1, 1], [9, 9, 0]]),
    )
    mask = batch.response_mask.clone()
    mask[2] = False  # as an overlong row
    batch = replace(batch, response_mask=mask)
    loss = loss_of(
        batch,
        batch.behaviour_logprobs.clone().requires_grad_(),
        normalisation=normalisation,
        **({"normalisation_length": 10} if normalisation == "constant" else {}),
    )
    near(loss, expected)


def test_a_constant_normalisation_without_its_length_is_refused():
    batch, logprobs = row([1.0], [1.0])
    with raises(LengthMissing, setting="normalisation_length"):
        policy_update(batch, logprobs, read_settings({"preset": "dr_grpo"}))
    config = read_settings({"preset": "dr_grpo"}).with_limit(8)
    assert float(policy_update(batch, logprobs, config).denominator) == 8.0


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        # d = log pi - log reference: log 2 and -log 2.
        ("k1", [log(2), -log(2)], [1.0, 1.0]),
        ("k2", [log(2) ** 2 / 2] * 2, [log(2), -log(2)]),
        # e^-d - 1 + d: 1/2 - 1 + log 2, and 2 - 1 - log 2; gradient 1 - e^-d.
        ("k3", [log(2) - 0.5, 1 - log(2)], [0.5, -1.0]),
    ],
)
def test_a_kl_penalty_in_the_loss_is_its_estimate(estimator, values, gradients):
    batch, logprobs = row([1.0, 1.0], [0.0, 0.0])
    reference = logprobs.detach() - torch.tensor([[log(2), -log(2)]], dtype=torch.float64)
    batch = replace(batch, reference_logprobs=reference)
    kl = {"estimator": estimator, "coefficient": 0.5, "weighted": estimator == "k1"}
    near(loss_of(batch, logprobs, kl=kl), 0.5 * sum(values) / 2)
    # Weighted k1 at ratio 1: d(r d)/dlogp = r d + r.
    shown = [log(2) + 1, -log(2) + 1] if estimator == "k1" else gradients
    near(gradient_of(batch, logprobs, kl=kl), [[0.25 * slope for slope in shown]])
    metrics = policy_update(batch, logprobs, read_settings({"kl": kl})).metrics.values()
    assert metrics["kl_loss"] == pytest.approx(sum(values) / 2)


def test_a_weighted_penalty_has_the_gradient_of_the_kl_itself():
    """Over a whole vocabulary, sampled by the old policy: sum_v mu r d is the KL, so is d/dx."""
    mu = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    x = torch.tensor([0.1, 0.9, -0.4], dtype=torch.float64, requires_grad=True)
    pi = x.log_softmax(-1)
    (expected,) = torch.autograd.grad((pi.exp() * (pi - reference)).sum(), x, retain_graph=True)
    from trinity_workers.algorithms.kl import kl_estimate

    for estimator in ("k1", "k3"):
        penalty = kl_estimate(pi, reference, estimator) * (pi - mu.log()).exp()
        (gradient,) = torch.autograd.grad((mu * penalty).sum(), x, retain_graph=True)
        near(gradient, expected)


def test_the_entropy_is_rewarded_by_its_coefficient():
    batch, logprobs = row([1.0, 1.0], [1.0, 1.0])
    entropy = torch.tensor([[0.5, 1.5]], dtype=torch.float64, requires_grad=True)
    config = read_settings({"entropy_coefficient": 0.1})
    update = policy_update(batch, logprobs, config, entropy=entropy)
    near(update.loss(update.denominator), -1.0 - 0.1 * 1.0)
    assert update.metrics.values()["entropy"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="needs the entropy"):
        policy_update(batch, logprobs, config)


def test_the_value_loss_takes_the_worse_of_free_and_clipped():
    # Old values 0, clip 0.2. V = 0.5, target 1: clipped to 0.2, (0.8)^2 > (0.5)^2, so 0.32.
    # V = -0.5, target 1: clipped to -0.2, (1.2)^2 < (1.5)^2, so 1.125.
    # V = -0.5, target -1: clipped to -0.2, (0.8)^2 > (0.5)^2, so 0.32.
    batch = make_batch(
        [3],
        values=torch.zeros(1, 3, dtype=torch.float64),
        returns=torch.tensor([[1.0, 1.0, -1.0]], dtype=torch.float64),
    )
    values = torch.tensor([[0.5, -0.5, -0.5]], dtype=torch.float64, requires_grad=True)
    update = value_update(batch, values, read_settings({"preset": "ppo"}))
    near(update.loss(update.denominator), (0.32 + 1.125 + 0.32) / 3)
    (gradient,) = torch.autograd.grad(update.loss(update.denominator), values)
    near(gradient, [[0.0, -1.5 / 3, 0.0]])  # the clipped ones have none
    assert update.metrics.values() == pytest.approx(
        {"vf_clipfrac": 2 / 3, "vf_loss": (0.32 + 1.125 + 0.32) / 3, "vpred_mean": -0.5 / 3}
    )
    free = value_update(batch, values, read_settings({"preset": "ppo", "critic": {"clip": None}}))
    near(free.loss(free.denominator), (0.125 + 1.125 + 0.125) / 3)


def test_a_ratio_beyond_all_bounds_gives_a_finite_loss_and_gradient():
    batch, logprobs = row([1.0, 1.0], [1.0, -1.0])
    batch = replace(batch, behaviour_logprobs=batch.behaviour_logprobs - 2000.0)
    for preset in ("grpo", "gspo", "cispo"):
        assert gradient_of(batch, logprobs, preset=preset).isfinite().all()


# --- every loss ----------------------------------------------------------------------------------

LOSSES = {
    "ppo": {},
    "ppo/kl": {"kl": {"coefficient": 0.1}},
    "ppo/weighted-kl": {"kl": {"coefficient": 0.1, "estimator": "k1", "weighted": True}},
    "ppo/dual": {"dual_clip": 1.5},
    "ppo/decoupled": {"importance_sampling": {"ratio_to": "proximal", "weights": "token"}},
    "ppo/sequence": {"importance_sampling": {"ratio_to": "proximal", "weights": "sequence"}},
    "ppo/icepop": {
        "importance_sampling": {
            "ratio_to": "proximal",
            "weights": "token",
            "cap": None,
            "mask": "icepop",
        }
    },
    "ppo/geometric": {
        "importance_sampling": {"mask": "geometric", "mask_low": 0.8, "mask_high": 1.3}
    },
    "grpo": {"preset": "grpo"},
    "dr_grpo": {"preset": "dr_grpo", "normalisation_length": 7},
    "dapo": {"preset": "dapo", "overlong": {"limit": 6}},
    "rloo": {"preset": "rloo"},
    "gspo": {"preset": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"preset": "cispo"},
    "reinforce": {"loss": "reinforce", "importance_sampling": {"weights": "token"}},
    "supervised": {"preset": "supervised"},
}
BY_ADVANTAGE = [name for name in LOSSES if name != "supervised" and "kl" not in name]


def drawn(lengths, seed=0, **given):
    batch = make_batch(lengths, seed=seed, dtype=torch.float64, holes=True, **given)
    return batch, batch.logprobs.clone().requires_grad_()


# The gradients of cispo and gspo are not those of their values, by their definitions.
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in {"cispo", "gspo"}])
def test_the_gradient_is_that_of_finite_differences(name):
    batch, logprobs = drawn([3, 1, 4, 2], seed=3)
    config = read_settings(LOSSES[name])
    if name == "reinforce" or "geometric" in name:
        # Weights and masks of the current policy are constants, which differences would move.
        batch = replace(batch, behaviour_logprobs=batch.logprobs.clone())
        config = read_settings({"loss": "reinforce"}) if name == "reinforce" else config

    def loss(x):
        return policy_update(batch, x, config).loss_sum

    assert torch.autograd.gradcheck(loss, (logprobs,))


def test_gspos_gradient_is_that_of_the_ratio_of_the_response():
    """Of eq. 5 written as it stands, by finite differences; the loss itself stops gradients."""
    batch, logprobs = drawn([3, 1, 4, 2], seed=3)
    mask = batch.response_mask
    advantages = torch.tensor([0.7, -0.4, 1.1, -0.9], dtype=torch.float64)
    batch = replace(batch, advantages=advantages[:, None] * mask)

    def eq_5(x):
        mean = ((x - batch.behaviour_logprobs) * mask).sum(-1) / mask.sum(-1)
        s = mean.exp()
        return -torch.minimum(s * advantages, s.clamp(0.8, 1.2) * advantages).sum()

    assert torch.autograd.gradcheck(eq_5, (logprobs,))
    (expected,) = torch.autograd.grad(eq_5(logprobs), logprobs)
    update = policy_update(batch, logprobs, read_settings(LOSSES["gspo"]))
    near(update.loss_sum, eq_5(logprobs))
    near(torch.autograd.grad(update.loss_sum, logprobs)[0], expected)


@pytest.mark.parametrize("name", BY_ADVANTAGE)
def test_advantages_of_zero_give_a_gradient_of_exactly_zero(name):
    batch, logprobs = drawn([3, 1, 4])
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    assert not gradient_of(batch, logprobs, **LOSSES[name]).any()


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_that_are_masked_get_a_gradient_of_exactly_zero_whatever_stands_there(name):
    batch, logprobs = drawn([3, 1, 4])
    config = read_settings(LOSSES[name])
    clean = policy_update(batch, logprobs, config)
    (expected,) = torch.autograd.grad(clean.loss_sum, logprobs)
    mask = batch.response_mask
    garbage = {
        field: torch.where(mask, tensor, torch.full_like(tensor, value))
        for field, tensor, value in (
            ("behaviour_logprobs", batch.behaviour_logprobs, float("-inf")),
            ("proximal_logprobs", batch.proximal_logprobs, float("nan")),
            ("reference_logprobs", batch.reference_logprobs, float("-inf")),
            ("advantages", batch.advantages, float("nan")),
        )
    }
    dirty = torch.where(mask, logprobs.detach(), torch.tensor(float("nan"), dtype=torch.float64))
    dirty.requires_grad_()
    update = policy_update(replace(batch, **garbage), dirty, config)
    (gradient,) = torch.autograd.grad(update.loss_sum, dirty)
    assert not gradient[~mask].any()
    assert gradient.isfinite().all()
    near(gradient, expected)
    near(update.loss_sum, clean.loss_sum)
    assert update.metrics.values() == pytest.approx(clean.metrics.values())


@examples(30)
@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=7),
    st.sampled_from(sorted(LOSSES)),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_padding_order_and_ranks_change_no_loss_gradient_or_metric(lengths, name, size, lot):
    batch, logprobs = drawn(lengths)
    config = read_settings(LOSSES[name])
    whole = policy_update(batch, logprobs, config)
    (expected,) = torch.autograd.grad(whole.loss(whole.denominator), logprobs)

    order = list(range(len(batch)))
    lot.shuffle(order)
    moved = batch.reorder(order).padded(size)
    x = moved.logprobs.clone().requires_grad_()
    parts, start = [], 0
    for part in moved.split(size):
        parts.append(policy_update(part, x[start : start + len(part)], config))
        start += len(part)
    denominator = sum(part.denominator for part in parts)
    # FSDP averages over ranks: each rank's loss is multiplied by their number.
    losses = [part.loss(denominator, ranks=len(parts)) for part in parts]
    (gradient,) = torch.autograd.grad(sum(losses) / len(losses), x)
    near(denominator, whole.denominator)
    near(sum(losses) / len(losses), whole.loss(whole.denominator))
    near(gradient[: len(batch)], expected[order])
    assert not gradient[len(batch) :].any()
    metrics = parts[0].metrics
    for part in parts[1:]:
        metrics = metrics + part.metrics
    assert metrics.values() == pytest.approx(whole.metrics.values())


def test_a_part_without_a_token_gives_zero_and_a_gradient():
    batch, logprobs = drawn([2, 3])
    empty = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    update = policy_update(empty, logprobs, read_settings({}))
    assert update.loss(update.denominator).item() == 0.0
    assert not torch.autograd.grad(update.loss(update.denominator), logprobs)[0].any()
    assert set(update.metrics.values().values()) == {0.0}


def test_means_of_ranks_are_reduced_as_sums():
    mask = torch.tensor([[True, True, False]])
    means = Means.from_tokens({"a": torch.tensor([[1.0, 2.0, 9.0]])}, mask)
    assert means.reduced(lambda tensor: tensor * 3).values() == {"a": 1.5}
    both = means + Means.from_rows({"b": torch.tensor([4.0])}, torch.tensor([True]))
    assert both.values() == {"a": 1.5, "b": 4.0}
    with pytest.raises(ValueError, match="overlap"):
        both + means
