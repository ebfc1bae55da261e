"""No optimizer step is taken on a loss or a norm that is not finite (invariants of finite.py)."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.experiences import make_groups  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from tests.support.tensors import identical  # noqa: E402
from trinity_workers.algorithms.batch import Batch  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.engines.learning_rate import LearningRate  # noqa: E402
from trinity_workers.engines.verl.fsdp import VerlEngine  # noqa: E402
from trinity_workers.learning.adapters import policy_loader  # noqa: E402
from trinity_workers.learning.lora_settings import LoraConfig  # noqa: E402
from trinity_workers.learning.values import load_critic  # noqa: E402
from trinity_workers.trainer.step.base import Models  # noqa: E402
from trinity_workers.trainer.step.fsdp import FSDPTrainingStep  # noqa: E402
from trinity_workers.trainer.step.skipped_updates import SkipCause, TooManySkippedSteps  # noqa: E402

CPU = torch.device("cpu")
RATES = LearningRate(highest=1e-3, warmup_steps=4)
LIMIT = 12
HUGE = float(torch.finfo(torch.float32).max)


def rows_of(rank: Rank, seed: int) -> Batch:
    """The rank's rows: whole groups."""
    return collate(make_groups("r", seed, count=4)[rank.number :: rank.world], 0)


def spoiled(batch: Batch, kind: str, value: float) -> Batch:
    """The batch, in whose first row, or in all, a number is not finite."""
    if kind == "all rewards":
        return replace(batch, rewards=torch.full_like(batch.rewards, value))
    if kind == "rewards":
        return replace(batch, rewards=batch.rewards.index_fill(0, torch.tensor([0]), value))
    first = torch.zeros_like(batch.response_mask)
    first[0, 0] = True
    return replace(batch, behaviour_logprobs=batch.behaviour_logprobs.masked_fill(first, value))


def make_step(folder: Path, values: dict, *, lora: bool = False, **options) -> FSDPTrainingStep:
    settings = read_settings(values).with_limit(LIMIT)
    policy = FSDPEngine(
        folder,
        device=CPU,
        learning_rate=RATES,
        load=policy_loader(LoraConfig(rank=4), 0) if lora else None,
    )
    critic = None
    if settings.critic.use:
        critic = FSDPEngine(folder, device=CPU, learning_rate=RATES, load=load_critic)
    return FSDPTrainingStep(Models(policy, critic), settings, **options)


def state_of(step: FSDPTrainingStep) -> list:
    """Parameters, optimizer state and schedule of all models, as they are on this rank."""
    return [
        copy.deepcopy(
            [
                [parameter.detach().to_local() for parameter in engine.module.parameters()],
                engine.optimizer.state_dict(),
                engine.scheduler.state_dict(),
                engine.steps,
            ]
        )
        for engine in step.models.trained
    ]


def assert_same(first, other) -> None:
    if isinstance(first, torch.Tensor):
        first, other = (getattr(each, "_local_tensor", each) for each in (first, other))
        assert identical(first, other)
    elif isinstance(first, dict):
        assert first.keys() == other.keys()
        for key, value in first.items():
            assert_same(value, other[key])
    elif isinstance(first, list):
        for mine, its in zip(first, other, strict=True):
            assert_same(mine, its)
    else:
        assert first == other


def learn_spoiled(rank: Rank, folder: Path, case: tuple) -> tuple[dict, dict, dict]:
    """Take a step, one of which rank 1's rows are bad, and another; return their metrics.

    The bad step leaves everything as it was, and the step after it is the one that an undisturbed
    trainer takes.
    """
    values, kind, value, lora = case
    torch.manual_seed(0)
    step, undisturbed = (make_step(folder, values, lora=lora) for _ in range(2))
    first = step.learn(rows_of(rank, 1))
    undisturbed.learn(rows_of(rank, 1))
    before = state_of(step)
    bad = rows_of(rank, 2)
    if rank.number == rank.world - 1:
        bad = spoiled(bad, kind, value)
    skipped = step.learn(bad)
    assert_same(state_of(step), before)
    third = step.learn(rows_of(rank, 3))
    undisturbed.learn(rows_of(rank, 3))
    assert_same(state_of(step), state_of(undisturbed))
    return first, skipped, third


PPO = {"preset": "ppo"}
CASES = {
    "policy": ({}, "rewards", math.inf, False),
    "policy, its own log-probabilities": ({}, "behaviour_logprobs", math.nan, False),
    "several updates": ({"epochs": 2, "mini_batches": 2}, "all rewards", math.nan, False),
    "critic": (PPO, "rewards", math.inf, False),
    "adapters": ({}, "rewards", -math.inf, True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_row_of_any_rank_leaves_every_model_its_optimizer_and_its_schedule_as_they_were(
    rank_group, policy_folder, name
):
    if name == "adapters":
        pytest.importorskip("peft")
    world = 2 if name in {"policy", "critic"} else 1
    models = ("", "critic/") if name == "critic" else ("",)
    for first, skipped, third in rank_group(world)(learn_spoiled, policy_folder, CASES[name]):
        for prefix in models:
            metric = f"{prefix}skipped_updates"
            assert first[metric] == third[metric] == 0
            assert skipped[metric] >= 1
        assert math.isfinite(third["gradient_norm"])


def take_losses(rank: Rank, folder: Path, losses: dict[int, float]) -> tuple[float, bool]:
    """Take an engine's step with a loss that is not finite on some ranks; gradients are."""
    engine = FSDPEngine(folder, device=CPU, learning_rate=1e-3)
    before = [parameter.detach().to_local().clone() for parameter in engine.module.parameters()]
    loss = engine.module(torch.tensor([[10, 20, 30]])).logits.square().mean()
    norm = engine.optimizer_step(loss + losses.get(rank.number, 0.0))
    after = [parameter.detach().to_local() for parameter in engine.module.parameters()]
    same = all(identical(tensor, other) for tensor, other in zip(before, after, strict=True))
    return norm, same and engine.steps == 0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_on_one_rank_is_no_step_though_its_gradients_are_finite(
    rank_group, policy_folder, value
):
    for norm, is_unchanged in rank_group(2)(take_losses, policy_folder, {1: value}):
        assert not math.isfinite(norm)
        assert is_unchanged


def fail(rank: Rank, folder: Path, order: list[bool], limit: int) -> tuple[int, Exception]:
    """Take bad and good steps until one raises; return its number and its error."""
    step = make_step(folder, {}, max_skipped_steps=limit)
    for number, is_bad in enumerate(order, 1):
        rows = rows_of(rank, number)
        if is_bad and rank.number == 1:
            rows = spoiled(rows, "rewards", math.inf)
        try:
            step.learn(rows, step=number)
        except TooManySkippedSteps as error:
            return number, pickle.loads(pickle.dumps(error))
    raise AssertionError("no step raised")


def test_skipped_steps_in_a_row_end_the_run_on_all_ranks_with_the_prompts_of_the_cause(
    rank_group, policy_folder
):
    order = [True, True, False, True, True, True]
    for number, error in rank_group(2)(fail, policy_folder, order, 3):
        assert number == error.step == 6
        assert (error.model, error.count) == ("policy", 3)
        assert error.reason == SkipCause("rewards", 1, (1,))
        assert str(error).startswith(
            "step 6: updates of the policy were skipped in 3 steps in a row, because the rewards "
            "of rank 1 (prompts 1) are not finite: "
        )


def test_of_an_own_loss_the_rank_and_its_prompts_are_the_cause(rank_group, policy_folder):
    [cause] = rank_group(1)(fail_by_loss, policy_folder)
    assert cause == SkipCause("loss", 0, (0, 1, 2, 3))
    assert str(cause) == "the loss of rank 0 (prompts 0, 1, 2, 3) is not finite"


def fail_by_loss(rank: Rank, folder: Path) -> SkipCause:
    step = make_step(folder, {}, max_skipped_steps=1)
    policy_loss = step._policy_loss

    def overflowing(*arguments):
        update = policy_loss(*arguments)
        return update._replace(loss_sum=update.loss_sum * HUGE * HUGE)

    step._policy_loss = overflowing
    with pytest.raises(TooManySkippedSteps) as raised:
        step.learn(rows_of(rank, 1))
    return raised.value.reason


def score_infinitely(rank: Rank, folder: Path) -> SkipCause:
    """Take a step whose reward model gives the rows of the first prompt an infinite score."""
    step = make_step(folder, {}, max_skipped_steps=1)
    step.models = step.models._replace(reward_model=object())
    step.compute_rm_score = lambda batch, _: torch.where(batch.groups == 0, math.inf, 0.5)
    with pytest.raises(TooManySkippedSteps) as raised:
        step.learn(rows_of(rank, 1))
    assert step.models.policy.steps == 0
    return raised.value.reason


def test_scores_of_a_reward_model_that_are_not_finite_are_no_step(rank_group, policy_folder):
    [cause] = rank_group(1)(score_infinitely, policy_folder)
    assert cause == SkipCause("rewards", 0, (0,))


class VerlRecorder:
    """veRL's engine, as far as an update calls it; its norm is given."""

    def __init__(self, norm: float) -> None:
        self.norm = norm
        self.schedule_steps = 0

    def train_mode(self):
        return torch.enable_grad()

    def optimizer_zero_grad(self) -> None:
        """Nothing to drop."""

    def optimizer_step(self) -> float:
        return self.norm

    def lr_scheduler_step(self) -> None:
        self.schedule_steps += 1


@pytest.mark.parametrize(("norm", "steps"), [(1.0, 1), (math.nan, 0), (math.inf, 0)])
def test_the_schedule_of_verls_engine_stays_where_verl_takes_no_step(norm, steps):
    engine = VerlEngine.__new__(VerlEngine)
    engine.verl = VerlRecorder(norm)
    gradient_norm = engine.update([], lambda *_: torch.tensor(0.0), temperature=1.0, entropy=False)
    assert gradient_norm == norm or math.isnan(norm)
    assert engine.verl.schedule_steps == steps
