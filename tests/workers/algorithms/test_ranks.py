"""One step on FSDP ranks has the gradients of the same step in one process."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from tests.support.batches import near  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from trinity_schemas import Experience, StepRef, Turn  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.logits import token_statistics  # noqa: E402
from trinity_workers.algorithms.prepare import prepare  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.algorithms.update import policy_update  # noqa: E402

PRESETS = {
    "dapo": {"preset": "dapo"},
    "grpo": {"preset": "grpo", "entropy_coefficient": 0.01},
    "dr_grpo": {"preset": "dr_grpo", "filters": {"zero_variance": "mask"}},
    "reinforce++": {"preset": "reinforce++"},
    "reinforce++-baseline": {"preset": "reinforce++-baseline"},
    "gspo": {"preset": "gspo", "scale": "batch"},
    "cispo": {"preset": "cispo", "overlong": {"mask": True}},
}


def made_groups(count: int = 5) -> list[list[Experience]]:
    """Groups whose lengths differ much, so that ranks get shares of very different size."""
    lot = random.Random(0)
    return [[_episode(lot, ordinal, sample) for sample in range(4)] for ordinal in range(count)]


def _episode(lot: random.Random, ordinal: int, sample: int) -> Experience:
    tokens = [lot.randint(3, 90) for _ in range(lot.randint(*((1, 4) if ordinal % 2 else (6, 12))))]
    return Experience(
        run_id="r",
        epoch=1,
        ordinal=ordinal,
        attempt=1,
        sample=sample,
        samples=4,
        explorer="explorer-0",
        turns=[
            Turn(role="prompt", tokens=[5 + ordinal] * (2 + ordinal)),
            Turn(
                role="policy",
                tokens=tokens,
                logprobs=[lot.uniform(-4.8, -4.3) for _ in tokens],
                versions=[(StepRef(1, 0), len(tokens))],
            ),
        ],
        reward=float(sample == 0 or lot.random() < 0.5),
        finished=lot.random() < 0.7,
    )


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def step(rank: Rank, folder: Path, values: dict) -> tuple[dict, dict]:
    """Take a step on this rank's share of the groups; returns full gradients, and metrics."""
    from trinity_workers.engines.adamw import AdamWOptions
    from trinity_workers.engines.fsdp import FSDPEngine

    engine = FSDPEngine(
        folder,
        device=torch.device("cpu"),
        learning_rate=0.0,
        adamw=AdamWOptions(max_grad_norm=float("inf")),
    )
    config = read_settings(values).with_limit(12)
    groups = made_groups()[rank.number :: rank.world]
    batch, means = prepare(collate(groups, engine.tokenizer.pad_token_id), config, all_reduce)
    output = engine.module(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=batch.response_width + 1,
        use_cache=False,
    )
    current = token_statistics(output.logits[:, :-1], batch.responses, entropy=True)
    update = policy_update(batch, current.logprobs, config, entropy=current.entropy)
    engine.optimizer_step(update.loss(all_reduce(update.denominator), rank.world))
    gradients = {}
    for name, parameter in engine.module.named_parameters():
        grad = parameter.grad
        gradients[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    metrics = (means + update.metrics).reduced(all_reduce)
    return gradients, metrics.values()


@pytest.mark.parametrize("name", PRESETS)
def test_two_ranks_give_the_gradients_and_metrics_of_one(rank_group, policy_folder, name):
    alone, told_alone = rank_group(1)(step, policy_folder, PRESETS[name])[0]
    shared = rank_group(2)(step, policy_folder, PRESETS[name])
    assert max(float(grad.abs().max()) for grad in alone.values()) > 1e-3
    for gradients, metrics in shared:
        for key, grad in gradients.items():
            near(grad, alone[key], 1e-5)
        assert metrics == pytest.approx(told_alone, abs=1e-5)
