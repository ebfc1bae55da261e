"""A training step on FSDP is what plain torch computes, however its batch is divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForTokenClassification  # noqa: E402

from tests.support.experiences import make_groups  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from trinity_workers.algorithms.batch import Batch, concatenate  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.distillation import token_divergence  # noqa: E402
from trinity_workers.algorithms.prepare import prepare  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.algorithms.settings import AlgorithmConfig  # noqa: E402
from trinity_workers.algorithms.update import policy_update, value_update  # noqa: E402
from trinity_workers.engines.adamw import AdamWOptions  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine, frozen_policy  # noqa: E402
from trinity_workers.engines.fsdp_context import ContextRanks  # noqa: E402
from trinity_workers.engines.fsdp_options import FSDPOptions  # noqa: E402
from trinity_workers.engines.fsdp_tensor import TensorRanks  # noqa: E402
from trinity_workers.engines.learning_rate import LearningRate  # noqa: E402
from trinity_workers.learning.logprobs import response_logits, response_logprobs  # noqa: E402
from trinity_workers.learning.policy import create_policy, load_policy  # noqa: E402
from trinity_workers.learning.values import load_critic  # noqa: E402
from trinity_workers.trainer.step.base import Models  # noqa: E402
from trinity_workers.trainer.step.division import MicroBatchLimit  # noqa: E402
from trinity_workers.trainer.step.fsdp import FSDPTrainingStep  # noqa: E402

CPU = torch.device("cpu")
RATES = LearningRate(highest=1e-3, warmup_steps=2, schedule="linear", steps=12)
CRITIC_RATE = 3e-3
GRADIENT_NORM = 0.5
LIMIT = 12
PROXIMAL = {"ratio_to": "proximal", "weights": "token"}


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny models: several threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def teacher_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    create_policy(folder, seed=7)
    return folder


def settings_of(values: dict) -> AlgorithmConfig:
    return read_settings(values).with_limit(LIMIT)


def share(seed: int, rank: int, world: int) -> Batch:
    """The rows of a rank; ranks get shares of very different size."""
    return collate(make_groups("r", seed)[rank::world], 0)


def take_steps(
    rank: Rank,
    folder: Path,
    teacher: Path | None,
    values: dict,
    *,
    memory: FSDPOptions = FSDPOptions(),  # noqa: B008  # frozen
    context: int = 1,
    tensor: int = 1,
    **options,
):
    """Take two steps; return their metrics, the last gradients and the weights, in full."""
    torch.manual_seed(0)
    settings = settings_of(values)
    shared = {"context": ContextRanks.of(context, CPU), "tensor": TensorRanks.of(tensor, CPU)}
    common = {"device": CPU, "options": msgspec.structs.replace(memory, **shared)}
    trained = common | {"adamw": AdamWOptions(max_grad_norm=GRADIENT_NORM)}
    policy = FSDPEngine(folder, learning_rate=RATES, **trained)
    critic = None
    if settings.critic.use:
        critic = FSDPEngine(folder, learning_rate=CRITIC_RATE, load=load_critic, **trained)
    needs_reference = "reference_logprobs" in settings.needed_fields
    reference = frozen_policy(folder, **common) if needs_reference else None
    teaches = frozen_policy(teacher, **common) if settings.needs_teacher else None
    models = Models(policy, critic, reference, teaches)
    step = FSDPTrainingStep(models, settings, **shared, **options)
    replica, replicas = rank.number // context // tensor, rank.world // context // tensor
    metrics = [step.learn(share(seed, replica, replicas)) for seed in (1, 2)]
    gradients, weights = {}, {}
    for prefix, engine in (("policy.", policy), ("critic.", critic)):
        if engine is not None:
            for name, parameter in engine.module.named_parameters():
                weights[prefix + name] = parameter.detach().full_tensor().clone()
                if parameter.grad is not None:
                    gradients[prefix + name] = parameter.grad.full_tensor().clone()
    return metrics, gradients, weights


DIVIDED = {
    "token-mean": {},
    "sequence-mean": {"preset": "grpo", "entropy_coefficient": 0.01},
    "constant": {"preset": "dr_grpo", "filters": {"zero_variance": "mask"}},
    "summed": {"preset": "rloo", "kl": {"coefficient": 0.1}},
    "gspo": {"preset": "gspo"},
    "decoupled": {"importance_sampling": PROXIMAL, "epochs": 2, "mini_batches": 2},
    "ppo": {"preset": "ppo", "normalisation": "sequence-mean"},
}


@pytest.mark.parametrize("name", DIVIDED)
def test_micro_batches_and_fused_losses_have_the_numbers_of_the_whole_batch(
    rank_group, policy_folder, name
):
    ranks = rank_group(2)
    whole = ranks(take_steps, policy_folder, None, DIVIDED[name])
    for limit, fused in ((MicroBatchLimit(rows=3), False), (MicroBatchLimit(tokens=40), True)):
        parts = ranks(_divided, policy_folder, DIVIDED[name], limit, fused=fused)
        for (metrics, gradients, weights), expected in zip(parts, whole, strict=True):
            assert metrics[1] == pytest.approx(expected[0][1], abs=1e-4, rel=1e-4)
            assert max(float(gradient.abs().max()) for gradient in expected[1].values()) > 1e-4
            for key, value in expected[1].items():
                torch.testing.assert_close(gradients[key], value, atol=2e-5, rtol=1e-3)
            for key, value in expected[2].items():
                torch.testing.assert_close(weights[key], value, atol=1e-4, rtol=0)


def _divided(rank: Rank, folder: Path, values: dict, limit: MicroBatchLimit, *, fused: bool):
    return take_steps(rank, folder, None, values, limit=limit, fused=fused)


SHARED = {
    "sequence-mean": (DIVIDED["sequence-mean"], {}),
    "fused": (
        DIVIDED["decoupled"],
        {"fused": True, "memory": FSDPOptions(recompute=True, shard_layers_from=1)},
    ),
    "critic": (DIVIDED["ppo"] | {"kl": {"coefficient": 0.1}}, {"limit": MicroBatchLimit(rows=3)}),
    "teacher": ({"advantage": "none", "loss": "divergence", "teacher": {"path": "given"}}, {}),
}


@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_sequences_or_layers_have_the_numbers_of_one(
    rank_group, policy_folder, teacher_of, name
):
    values, options = SHARED[name]
    [whole] = rank_group(1)(take_steps, policy_folder, teacher_of, values, **options)
    ranks = rank_group(2)
    for way in ("context", "tensor"):
        shared = ranks(take_steps, policy_folder, teacher_of, values, **{way: 2}, **options)
        for metrics, gradients, weights in shared:
            for step in (0, 1):
                # Norms before the clip among them: AdamW would hide a factor.
                assert metrics[step] == pytest.approx(whole[0][step], abs=1e-4, rel=1e-4)
            assert metrics[0]["gradient_norm"] > 1e-3
            for key, value in whole[1].items():
                torch.testing.assert_close(gradients[key], value, atol=2e-5, rtol=1e-3)
            for key, value in whole[2].items():
                torch.testing.assert_close(weights[key], value, atol=1e-4, rtol=0)


@pytest.mark.nightly(
    "workers/trainer/test_fsdp_step.py::"
    "test_ranks_that_share_sequences_or_layers_have_the_numbers_of_one"
)
@pytest.mark.parametrize("way", ["context", "tensor"])
def test_replicas_whose_ranks_share_them_have_the_numbers_of_whole_ones(
    rank_group, policy_folder, way
):
    values = DIVIDED["sequence-mean"]
    whole = rank_group(2)(take_steps, policy_folder, None, values)
    shared = rank_group(4)(take_steps, policy_folder, None, values, **{way: 2})
    for metrics, _, weights in shared:
        assert metrics[1] == pytest.approx(whole[0][0][1], abs=1e-4, rel=1e-4)
        for key, value in whole[0][2].items():
            torch.testing.assert_close(weights[key], value, atol=1e-4, rtol=0)


UPDATES = {
    "behaviour": {"epochs": 3},
    "mini-batches": {"mini_batches": 3, "importance_sampling": PROXIMAL},
    "both": {
        **{"epochs": 2, "mini_batches": 2, "importance_sampling": PROXIMAL},
        "kl": {"estimator": "k1", "where": "reward", "coefficient": 0.1},
    },
    "ppo": {"preset": "ppo", "epochs": 2, "mini_batches": 2},
    "ppo, critic first": {"preset": "ppo", "critic": {"use": True, "critic_warmup_steps": 1}},
    "distillation": {"preset": "distillation", "teacher": {"path": "given"}},
    "divergence": {
        **{"advantage": "none", "loss": "divergence"},
        "teacher": {"path": "given", "divergence": "jensen-shannon", "mixture": 0.3},
    },
}


class Plain:
    """The same steps on one model in one process, without FSDP and without this step's code."""

    def __init__(self, folder: Path, teacher: Path, settings: AlgorithmConfig) -> None:
        self.settings = settings
        self.policy, _ = load_policy(folder)
        self.reference, _ = load_policy(folder)
        self.teacher, _ = load_policy(teacher)
        self.critic = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1).eval()
        torch.nn.init.zeros_(self.critic.score.weight)
        torch.nn.init.zeros_(self.critic.score.bias)
        self.updates = 0
        self.optimizers = {
            name: torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99))
            for name, model, rate in (
                ("policy", self.policy, 0.0),
                ("critic", self.critic, CRITIC_RATE),
            )
        }

    def weights(self) -> dict[str, torch.Tensor]:
        models = {"policy": self.policy}
        if self.settings.critic.use:
            models["critic"] = self.critic
        return {
            f"{name}.{key}": parameter.detach().clone()
            for name, model in models.items()
            for key, parameter in model.named_parameters()
        }

    def values(self, batch: Batch) -> torch.Tensor:
        """The critic's value before each token: each row by itself, without its padding."""
        mask = torch.zeros(batch.response_mask.shape)
        rows = []
        for row in range(len(batch)):
            real = batch.attention_mask[row].bool()
            logits = self.critic(input_ids=batch.input_ids[row][real][None]).logits[0, :, 0]
            count = int(real[batch.prompt_width :].sum())
            rows.append(logits[-count - 1 : -1])
            mask[row, :count] = 1.0
        return mask.masked_scatter(mask.bool(), torch.cat(rows)) * batch.response_mask

    def step(self, shares: list[Batch]) -> None:
        settings, sizes = self.settings, [len(share) for share in shares]
        batch = concatenate(shares)
        with torch.no_grad():
            batch = replace(
                batch,
                proximal_logprobs=response_logprobs(self.policy, batch),
                reference_logprobs=response_logprobs(self.reference, batch),
                teacher_logprobs=response_logprobs(self.teacher, batch),
                values=self.values(batch),
            )
        batch, _ = prepare(batch, settings)
        of_ranks = batch.split(sizes)
        minis = [
            concatenate(parts)
            for parts in zip(
                *(batch.equal_parts(settings.mini_batches) for batch in of_ranks), strict=True
            )
        ]
        if settings.critic.use:
            for _ in range(settings.epochs):
                for mini_batch in minis:
                    update = value_update(mini_batch, self.values_of_real(mini_batch), settings)
                    self._descend("critic", self.critic, update)
        if self.updates < 0:
            self.updates = 0
            return
        for _ in range(settings.epochs):
            for mini_batch in minis:
                logits = response_logits(self.policy, mini_batch)
                divergence = None
                if settings.loss == "divergence":
                    with torch.no_grad():
                        wise = response_logits(self.teacher, mini_batch)
                    divergence = token_divergence(logits, wise, "jensen-shannon", mixture=0.3)
                logprobs = response_logprobs(self.policy, mini_batch)
                update = policy_update(mini_batch, logprobs, settings, divergence=divergence)
                for group in self.optimizers["policy"].param_groups:
                    group["lr"] = RATES.at(self.updates)
                self._descend("policy", self.policy, update)
                self.updates += 1

    def values_of_real(self, batch: Batch) -> torch.Tensor:
        """Values of a mini-batch, whose last rows may be padding rows."""
        real = batch.groups >= 0
        output = torch.zeros(batch.response_mask.shape)
        return output.index_put((real.nonzero().squeeze(1),), self.values(batch.select(real)))

    def _descend(self, name: str, model, update) -> None:
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        update.loss(update.denominator).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()


def distance(weights: dict, other: dict, model: str) -> float:
    """Distance of two models' weights."""
    apart = [(weights[key] - other[key]).norm() for key in weights if key.startswith(f"{model}.")]
    return float(torch.stack(apart).norm())


@pytest.mark.parametrize("name", UPDATES)
def test_several_updates_a_critic_and_a_teacher_are_those_of_a_plain_loop(
    rank_group, policy_folder, teacher_of, name
):
    settings = settings_of(UPDATES[name])
    plain = Plain(policy_folder, teacher_of, settings)
    before = plain.weights()
    if settings.critic.critic_warmup_steps:
        plain.updates = -1  # the policy sits out the first step
    for seed in (1, 2):
        plain.step([share(seed, rank, 2) for rank in range(2)])
    expected = plain.weights()
    assert all((tensor - before[key]).abs().max() > 3e-4 for key, tensor in expected.items())
    for metrics, _, weights in rank_group(2)(take_steps, policy_folder, teacher_of, UPDATES[name]):
        assert sorted(weights) == sorted(expected)
        for model in {key.partition(".")[0] for key in expected}:
            # AdamW makes much of gradients near 0, so single elements may differ.
            apart = distance(weights, expected, model)
            assert apart <= 0.02 * distance(expected, before, model), model
        assert ("loss" in metrics[0]) == (not settings.critic.critic_warmup_steps)
        rate = RATES.at(plain.updates - 1)
        assert metrics[1]["learning_rate"] == pytest.approx(rate)


def learn_values(rank: Rank, folder: Path, steps: int) -> list[dict[str, float]]:
    """Train a critic on the same episodes again and again, before the policy's first update."""
    settings = settings_of({"preset": "ppo", "critic": {"use": True, "critic_warmup_steps": steps}})
    policy = FSDPEngine(folder, device=CPU, learning_rate=1e-3)
    critic = FSDPEngine(folder, device=CPU, learning_rate=3e-3, load=load_critic)
    step = FSDPTrainingStep(Models(policy, critic), settings)
    return [step.learn(share(1, rank.number, rank.world)) for _ in range(steps)]


def test_a_critic_learns_to_predict_the_returns_and_says_so_by_verls_names(
    rank_group, policy_folder
):
    [first, *_, last] = rank_group(1)(learn_values, policy_folder, 12)[0]
    assert first["critic/values/mean"] == 0.0, "the head begins at 0"
    assert first["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-6)
    assert last["critic/vf_loss"] < 0.5 * first["critic/vf_loss"]
    assert last["critic/vf_explained_var"] > 0.5
    names = {key for key in last if key.startswith("critic/")}
    assert {f"critic/{key}" for key in ("vf_clipfrac", "vpred_mean", "grad_norm", "lr")} <= names
    assert "gradient_norm" not in last, "the policy is not trained yet"
    assert not {key for key in last if "^" in key or "errors" in key}
