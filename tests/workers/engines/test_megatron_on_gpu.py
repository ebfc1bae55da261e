"""Megatron's layouts on a GPU, over NCCL: the steps of plain torch, with each kind of layers.

On a machine with one GPU its ranks share it: NCCL takes each for another host's.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support import megatron_steps as steps  # noqa: E402
from tests.support.gpu import needs_gpu  # noqa: E402
from tests.support.rank_processes import RankProcesses  # noqa: E402
from trinity_workers.engines.megatron import OptimizerOptions, ParallelLayout  # noqa: E402
from trinity_workers.engines.megatron.layout import has_transformer_engine  # noqa: E402

pytestmark = [pytest.mark.megatron, pytest.mark.processes, needs_gpu]

GPU = "cuda:0"
TOLERANCE = 1e-3
"""Of numbers near 1 and 5: float32, in the order of other kernels than the CPU's."""
LAYERS = [
    pytest.param(False, id="local"),
    pytest.param(
        True,
        id="transformer engine",
        marks=pytest.mark.skipif(
            not has_transformer_engine(), reason="Transformer Engine is not installed"
        ),
    ),
]


@pytest.fixture(scope="module")
def processes():
    made = RankProcesses("cuda")
    yield made
    made.close()


def take_steps(rank, batches):
    rows, made, weights = steps.take_steps(rank, [batch.to(torch.device(GPU)) for batch in batches])
    made = [
        None
        if step is None
        else step._replace(logprobs=step.logprobs.cpu(), entropy=step.entropy.cpu())
        for step in made
    ]
    return rows, made, {name: value.cpu() for name, value in weights.items()}


@pytest.mark.parametrize("fused", LAYERS)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3", ParallelLayout(tensor=2, sequence_parallel=True)),
        ("qwen3", ParallelLayout(pipeline=2)),
        ("qwen3", ParallelLayout(context=2)),
        ("qwen2-moe", ParallelLayout(expert=2)),
        ("deepseek", ParallelLayout(tensor=2, sequence_parallel=True)),
        ("deepseek", ParallelLayout(context=2)),
        ("deepseek", ParallelLayout(expert=2)),
    ],
)
def test_a_layout_on_a_gpu_takes_the_steps_of_plain_torch(
    processes, megatron_folder, name, layout, fused
):
    folder = megatron_folder(name)
    batches = [at.padded_batch(seed, rows=8) for seed in range(2)]
    optimizer = OptimizerOptions(learning_rate=steps.RATE, adamw=steps.ADAMW, distributed=True)
    ranks = processes.group(2)
    options = {"transformer_engine": fused}
    ranks(at.make_engine, folder, layout, optimizer, options, device=GPU)
    worst = steps.differences(ranks(take_steps, batches), steps.plain_steps(folder, batches))
    assert max(worst.values()) < TOLERANCE, worst
    processes.leave()
