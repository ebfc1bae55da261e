"""Losses, corrections and divergences give TRL's numbers and gradients."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.batches import make_batch, near
from trinity_workers.algorithms.distillation import token_divergence
from trinity_workers.algorithms.importance_sampling import importance_mask, importance_weights
from trinity_workers.algorithms.logits import token_statistics
from trinity_workers.algorithms.rules import read_settings
from trinity_workers.algorithms.settings import ImportanceSamplingConfig
from trinity_workers.algorithms.update import policy_update

pytestmark = [
    pytest.mark.processes,  # a library that TRL imports asks the system for the processor's name
    pytest.mark.filterwarnings("default"),  # TRL's and its libraries'
]


@pytest.fixture(scope="module")
def trl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gkd.gkd_trainer import GKDTrainer
        from trl.trainer import utils
        from trl.trainer.grpo_trainer import GRPOTrainer

    return SimpleNamespace(grpo=GRPOTrainer, gkd=GKDTrainer, utils=utils)


@pytest.fixture
def batch():
    made = make_batch([3, 1, 4, 2, 5, 2], seed=5)
    # One advantage for a response, as TRL has it.
    whole = torch.tensor([0.7, -0.7, 1.5, -1.5, 0.4, -0.4])[:, None]
    return replace(made, advantages=whole * made.response_mask)


class Accelerator:
    """What the loss asks of one process."""

    num_processes = 1
    sync_gradients = True
    device = torch.device("cpu")

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor, reduction="sum"):
        return tensor


def trls_loss(trl, batch, x, *, sampling_ratio=None, **settings):
    """Call `GRPOTrainer._compute_loss` itself on these log-probabilities."""
    trainer = SimpleNamespace(
        **{
            "loss_type": "dapo",
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "beta": 0.0,
            "max_completion_length": 10,
            **settings,
        },
        args=SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
            steps_per_generation=1,
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (x, torch.zeros_like(x), None),
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=sampling_ratio is not None,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    width = batch.response_width
    inputs = {
        "prompt_ids": batch.input_ids[:, :-width],
        "prompt_mask": batch.attention_mask[:, :-width],
        "completion_ids": batch.responses,
        "completion_mask": batch.response_mask.long(),
        "advantages": batch.advantages[:, 0],
        "old_per_token_logps": batch.behaviour_logprobs,
        "ref_per_token_logps": batch.reference_logprobs,
        "num_items_in_batch": batch.response_mask.sum(),
        "importance_sampling_ratio": sampling_ratio,
    }
    return trl.grpo._compute_loss(trainer, trainer.model, inputs), trainer._metrics["train"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"preset": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        ({"preset": "grpo"}, {"loss_type": "grpo"}),
        ({"preset": "dr_grpo", "normalisation_length": 10}, {"loss_type": "dr_grpo"}),
        ({"preset": "grpo", "kl": {"coefficient": 0.1}}, {"loss_type": "grpo", "beta": 0.1}),
        (
            {"kl": {"coefficient": 0.1, "weighted": True}},
            {"beta": 0.1, "use_bias_correction_kl": True},
        ),
        (
            {"preset": "gspo", "clip_low": 0.1, "clip_high": 0.15},
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon_low": 0.1,
                "epsilon_high": 0.15,
            },
        ),
        # TRL's bound of cispo is the ratio itself.
        ({"preset": "cispo", "clip_high": 0.5}, {"loss_type": "cispo", "epsilon_high": 1.5}),
    ],
)
def test_policy_losses(trl, batch, ours, theirs):
    x = batch.logprobs.clone().requires_grad_()
    expected, metrics = trls_loss(trl, batch, x, **theirs)
    update = policy_update(batch, x, read_settings(ours))
    loss = update.loss(update.denominator)
    near(loss, expected)
    near(torch.autograd.grad(loss, x)[0], torch.autograd.grad(expected, x)[0])
    shown = update.metrics.values()
    if "clip_ratio/region_mean" in metrics and "sequence" not in theirs.values():
        assert shown["pg_clipfrac"] == pytest.approx(metrics["clip_ratio/region_mean"][0])
        assert shown["pg_clipfrac"] > 0
    if "kl" in metrics:
        assert shown["kl_loss"] == pytest.approx(metrics["kl"][0])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_sampling(trl, batch, level):
    log_ratio = (batch.proximal_logprobs - batch.behaviour_logprobs) * batch.response_mask
    by_sequence = log_ratio.sum(-1, keepdim=True)
    ratio = (by_sequence if level == "sequence" else log_ratio).exp().clamp(max=1.5)
    x = batch.logprobs.clone().requires_grad_()
    decoupled = replace(batch, behaviour_logprobs=batch.proximal_logprobs)
    expected, _ = trls_loss(trl, decoupled, x, sampling_ratio=ratio)
    sampling = {"ratio_to": "proximal", "weights": level, "cap": 1.5}
    update = policy_update(batch, x, read_settings({"importance_sampling": sampling}))
    near(update.loss(update.denominator), expected)
    config = ImportanceSamplingConfig(weights="token", cap=None, mask="icepop", mask_high=1.4)
    masked = importance_weights(log_ratio, batch.response_mask, config) * importance_mask(
        log_ratio, batch.response_mask, config
    )
    token = log_ratio.exp()
    expected_mask = token.masked_fill((token < 0.5) | (token > 1.4), 0.0)  # its token_mask
    near(masked, expected_mask * batch.response_mask)


def test_log_probabilities_and_entropies(trl):
    lot = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 17, generator=lot)
    tokens = torch.randint(0, 17, (2, 3), generator=lot)
    statistics = token_statistics(logits, tokens, entropy=True, chunk=2)
    near(statistics.logprobs, trl.utils.selective_log_softmax(logits, tokens))
    near(statistics.entropy, trl.utils.entropy_from_logits(logits))


@pytest.mark.parametrize(
    ("direction", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jensen-shannon", 0.3)]
)
def test_divergences(trl, direction, beta):
    lot = torch.Generator().manual_seed(0)
    student = torch.randn(2, 3, 17, generator=lot, requires_grad=True)
    teacher = torch.randn(2, 3, 17, generator=lot)
    divergence = token_divergence(student, teacher, direction, mixture=0.3, temperature=0.9)
    expected = trl.gkd.generalized_jsd_loss(
        student, teacher, beta=beta, temperature=0.9, reduction="none"
    ).sum(-1)
    near(divergence, expected)
    near(
        torch.autograd.grad(divergence.sum(), student)[0],
        torch.autograd.grad(expected.sum(), student)[0],
    )
