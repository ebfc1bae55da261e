"""A training step on Megatron has the numbers of a plain computation, at every layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core import parallel_state  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.support.batches import near  # noqa: E402
from tests.support.experiences import make_groups  # noqa: E402
from tests.support.megatron_ranks import (  # noqa: E402
    data_rank,
    drop_engine,
    join,
    make_engine,
)
from tests.support.rank_processes import Rank  # noqa: E402
from trinity_workers.algorithms.batch import Batch  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.partition import padded_size  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.engines.megatron import (  # noqa: E402
    MegatronEngine,
    ModelOptions,
    OptimizerOptions,
    ParallelLayout,
)
from trinity_workers.trainer.step.base import Models  # noqa: E402
from trinity_workers.trainer.step.division import (  # noqa: E402
    NO_LIMIT,
    MicroBatchLimit,
    division_of,
    row_sizes,
)
from trinity_workers.trainer.step.megatron import MegatronTrainingStep  # noqa: E402

pytestmark = [pytest.mark.server, pytest.mark.megatron]

TEMPERATURE = 0.7
CLIP, ENTROPY, KL = 0.2, 0.03, 0.1
ALGORITHM = {
    "entropy_coefficient": ENTROPY,
    "kl": {"coefficient": KL, "where": "loss", "estimator": "k3"},
}
FROZEN = OptimizerOptions(learning_rate=0.0)
# The llama has 97 tokens: with two tensor-parallel ranks, the last column is padding.
LAYOUTS = {
    "one rank": ("llama", 1, ParallelLayout(), NO_LIMIT),
    "TP 2": ("llama", 2, ParallelLayout(tensor=2), MicroBatchLimit(rows=6)),
    "TP 2, tied": ("qwen2", 2, ParallelLayout(tensor=2), NO_LIMIT),
    "PP 2": ("llama", 2, ParallelLayout(pipeline=2), MicroBatchLimit(tokens=40)),
    "TP 2 x PP 2": ("llama", 4, ParallelLayout(tensor=2, pipeline=2), MicroBatchLimit(tokens=60)),
    "EP 2": ("qwen3-moe", 2, ParallelLayout(expert=2), MicroBatchLimit(tokens=40)),
    "TP 2 SP": (
        "llama",
        2,
        ParallelLayout(tensor=2, sequence_parallel=True),
        MicroBatchLimit(tokens=40),
    ),
    "CP 2": ("llama", 2, ParallelLayout(context=2), MicroBatchLimit(rows=6)),
    "CP 2 x TP 2 SP": (
        "llama",
        4,
        ParallelLayout(tensor=2, context=2, sequence_parallel=True),
        MicroBatchLimit(tokens=60),
    ),
    "CP 4": ("qwen2", 4, ParallelLayout(context=4), MicroBatchLimit(tokens=60)),
    "CP 2 x DP 2": ("qwen2", 4, ParallelLayout(context=2), MicroBatchLimit(tokens=60)),
    "PP 2 x CP 2": ("llama", 4, ParallelLayout(pipeline=2, context=2), MicroBatchLimit(tokens=40)),
    "PP 2 x TP 2 SP": (
        "llama",
        4,
        ParallelLayout(tensor=2, pipeline=2, sequence_parallel=True),
        MicroBatchLimit(tokens=40),
    ),
    "CP 2 x EP 2": (
        "qwen3-moe",
        2,
        ParallelLayout(context=2, expert=2),
        MicroBatchLimit(tokens=40),
    ),
    "DP 2 x TP 2 SP, EP 2": (
        "qwen3-moe",
        4,
        ParallelLayout(tensor=2, expert=2, sequence_parallel=True),
        MicroBatchLimit(tokens=40),
    ),
    "CP 2 x TP 2 SP, EP 2": (
        "qwen2-moe",
        4,
        ParallelLayout(tensor=2, context=2, expert=2, sequence_parallel=True),
        MicroBatchLimit(tokens=40),
    ),
    "TP 2 SP x PP 2 x CP 2, EP 2": (
        "qwen2-moe",
        8,
        ParallelLayout(tensor=2, pipeline=2, context=2, expert=2, sequence_parallel=True),
        MicroBatchLimit(tokens=60),
    ),
}
SHORT = list(LAYOUTS)[:9]
"""Layouts of ``make test``; one of each kind."""


@dataclass
class Numbers:
    """Numbers of one step."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    metrics: dict[str, float]


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Groups of short and long answers, of tokens that the policy finds likely or not."""
    made = collate(make_groups("r", 1, count=4), 0)
    lot = torch.Generator().manual_seed(0)
    return replace(
        made,
        behaviour_logprobs=made.behaviour_logprobs
        + torch.randn(made.response_mask.shape, generator=lot) * made.response_mask,
    )


@pytest.fixture
def reference_of(tmp_path):
    """Makes a model that differs a little from the folder's."""

    def make(folder: Path) -> Path:
        model = AutoModelForCausalLM.from_pretrained(folder)
        lot = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=lot), alpha=0.02)
        model.save_pretrained(tmp_path)
        return tmp_path

    return make


def share_of(batch: Batch, share: int, shares: int) -> Batch:
    """The rows of a replica; two have other numbers of rows and columns."""
    mine = batch.split([12, 4] if shares == 2 else [16])[share]
    return mine.narrowed(*padded_size(row_sizes(mine)))


def take_steps(rank: Rank, folders: tuple[Path, Path], layout: ParallelLayout, limit, batch: Batch):
    """Take a step with whole logits and one without, each with learning rate 0.

    Returns the rank's replica, and the numbers of both steps for the replica's rows.
    """
    share, shares = data_rank_of(rank, layout)
    mine = share_of(batch, share, shares)
    numbers = [
        take_step(rank, folders, layout, limit, mine, fused=fused) for fused in (False, True)
    ]
    drop_engine(rank)
    return share, numbers


def data_rank_of(rank: Rank, layout: ParallelLayout) -> tuple[int, int]:
    """Which replica the rank is of, and of how many."""
    join(rank, layout)
    return data_rank()


def take_step(
    rank: Rank, folders: tuple[Path, Path], layout: ParallelLayout, limit, mine: Batch, *, fused
) -> Numbers:
    options = {"fused_loss": fused}
    make_engine(rank, folders[0], layout, FROZEN, options)
    policy = rank.objects.engine
    judge = MegatronEngine(
        folders[1], device=torch.device("cpu"), layout=layout, model=ModelOptions(**options)
    )
    settings = read_settings(ALGORITHM).with_limit(12)
    models = Models(policy, reference=judge)
    step = MegatronTrainingStep(models, settings, temperature=TEMPERATURE, limit=limit)
    metrics = step.learn(mine)
    experts = parallel_state.get_expert_model_parallel_group() if layout.expert > 1 else None
    division = division_of(mine, settings, limit, stages=layout.pipeline, alike=experts)
    divided = division.for_pass(mine)
    parts, _ = policy.train_batch(
        divided.parts,
        lambda current, _: (current.logprobs.sum() + current.entropy.sum(), current),
        temperature=TEMPERATURE,
        entropy=True,
    )
    if not parts:
        return Numbers(torch.empty(0), torch.empty(0), metrics)
    logprobs = divided.joined([part.logprobs.detach() for part in parts])
    entropy = divided.joined([part.entropy.detach() for part in parts])
    return Numbers(logprobs, entropy, metrics)


def distributions(model, batch: Batch) -> torch.Tensor:
    """Log-distributions [B, R, V] before response tokens: each row by itself, unpadded."""
    logprobs = torch.zeros(*batch.response_mask.shape, model.config.vocab_size)
    for row in range(len(batch)):
        real = batch.attention_mask[row].bool()
        logits = model(input_ids=batch.input_ids[row][real][None]).logits[0] / TEMPERATURE
        count = int(real[batch.prompt_width :].sum())
        logprobs[row, :count] = logits.log_softmax(-1)[-count - 1 : -1]
    return logprobs


def plainly(folder: Path, reference: Path, batch: Batch) -> Numbers:
    """The same numbers by the formulas themselves, in this process, by Hugging Face's model."""
    policy = AutoModelForCausalLM.from_pretrained(folder)
    mask, count = batch.response_mask, batch.response_mask.sum()

    def chosen(logs: torch.Tensor) -> torch.Tensor:
        return logs.gather(-1, batch.responses[..., None])[..., 0] * mask

    logs = distributions(policy, batch)
    logprobs, entropy = chosen(logs), -(logs.exp() * logs).sum(-1) * mask
    with torch.no_grad():
        judged = chosen(distributions(AutoModelForCausalLM.from_pretrained(reference), batch))
    groups = batch.rewards.view(-1, 4)
    centred = groups - groups.mean(1, keepdim=True)
    deviations = centred.square().mean(1, keepdim=True).sqrt()
    advantages = (centred / (deviations + 1e-4)).reshape(-1, 1)
    log_ratio = logprobs - batch.behaviour_logprobs * mask
    ratio = log_ratio.exp()
    free, bounded = ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
    difference = judged - logprobs
    kl = difference.exp() - 1 - difference

    def mean(values: torch.Tensor) -> torch.Tensor:
        return (values * mask).sum() / count

    loss = mean(-torch.minimum(free, bounded) + KL * kl - ENTROPY * entropy)
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in policy.parameters()]).norm()
    metrics = {
        "loss": loss,
        "pg_loss": mean(-torch.minimum(free, bounded)),
        "pg_clipfrac": mean((bounded < free).float()),
        "ppo_kl": mean(-log_ratio),
        "kl_loss": mean(kl),
        "entropy": mean(entropy),
        "gradient_norm": norm,
    }
    values = {name: float(value.detach()) for name, value in metrics.items()}
    return Numbers(logprobs.detach(), entropy.detach(), values)


@pytest.mark.parametrize(
    "where",
    [pytest.param(where, marks=[] if where in SHORT else pytest.mark.nightly) for where in LAYOUTS],
)
def test_every_number_of_a_step_is_that_of_a_plain_computation_with_whole_logits_or_without(
    rank_group, megatron_folder, reference_of, batch, where
):
    name, world, layout, limit = LAYOUTS[where]
    folders = megatron_folder(name), reference_of(megatron_folder(name))
    expected = plainly(*folders, batch)
    assert 0.1 < expected.metrics["pg_clipfrac"] < 0.9, "some ratios are clipped"
    assert expected.metrics["kl_loss"] > 0.01, "the reference is another model"
    for share, steps in rank_group(world)(take_steps, folders, layout, limit, batch):
        for numbers in steps:
            for key, value in expected.metrics.items():
                assert numbers.metrics[key] == pytest.approx(value, abs=1e-4, rel=1e-4), key
            if len(numbers.logprobs):
                rows = slice(12, 16) if share else slice(0, len(numbers.logprobs))
                columns = slice(0, numbers.logprobs.shape[1])
                near(numbers.logprobs, expected.logprobs[rows, columns], 1e-4)
                near(numbers.entropy, expected.entropy[rows, columns], 1e-4)
