"""Training on megatron-core: every layout learns what one rank learns."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tests import megatron_ranks as at  # noqa: E402
from trinity_workers.engines.megatron import OptimizerOptions, ParallelLayout  # noqa: E402
from trinity_workers.learning.grpo import response_logprobs  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # its own deadlines are shorter, and say what is missing

STEPS = 20
TOLERANCE = 1e-4
"""Of a loss near 5: sums of float32 are taken in another order, and AdamW magnifies that."""

CASES = [
    (2, ParallelLayout(tensor=2), {}, {}),
    (2, ParallelLayout(pipeline=2), {}, {}),
    (2, ParallelLayout(pipeline=2), {"recompute": True}, {}),
    (2, ParallelLayout(), {}, {}),
    (2, ParallelLayout(), {}, {"distributed": True}),
    (2, ParallelLayout(tensor=2), {"recompute": True}, {}),
    (4, ParallelLayout(tensor=2, pipeline=2), {}, {}),
    (4, ParallelLayout(tensor=2, pipeline=2), {"recompute": True}, {}),
    (4, ParallelLayout(tensor=2), {}, {"distributed": True}),
]


def optimizer(**values) -> OptimizerOptions:
    return OptimizerOptions(learning_rate=3e-3, ramp_steps=4, **values)


@pytest.fixture(scope="module")
def batches():
    return [at.padded_batch(step % 4, rows=8) for step in range(STEPS)]


@pytest.fixture(scope="module")
def losses_alone(rank_processes, megatron_folder, batches):
    """The losses of one rank."""
    ranks = rank_processes.group(1)
    ranks(at.make_engine, megatron_folder("qwen3"), ParallelLayout(), optimizer())
    [losses] = ranks(at.train, batches)
    rank_processes.leave()
    return losses


@pytest.mark.parametrize(("world", "layout", "options", "values"), CASES)
def test_losses_follow_those_of_one_rank_for_twenty_steps(
    losses_alone, batches, engine_ranks, world, layout, options, values
):
    assert losses_alone[-1] < losses_alone[0] - 0.3, "there was something to learn"
    ranks = engine_ranks("qwen3", world, layout, optimizer(**values), options)
    found = [losses for losses in ranks(at.train, batches) if any(losses)]
    assert len(found) == world // layout.pipeline
    for losses in found:
        assert losses == pytest.approx(losses_alone, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        ("qwen2", 2, ParallelLayout(tensor=2)),
        ("qwen2", 2, ParallelLayout(pipeline=2)),
        ("llama", 2, ParallelLayout(tensor=2)),
    ],
)
def test_logprobs_of_padded_rows_are_hugging_faces(
    engine_ranks, megatron_folder, name, world, layout
):
    from transformers import AutoModelForCausalLM

    batch = at.padded_batch(5)
    assert (batch.attention_mask[:, 0] == 0).any(), "some prompts are shorter"
    reference = AutoModelForCausalLM.from_pretrained(megatron_folder(name))
    with torch.no_grad():
        expected = response_logprobs(reference, batch, temperature=0.7)
    ranks = engine_ranks(name, world, layout)
    found = [one for one in ranks(at.logprobs, batch) if one is not None]
    assert found
    for one in found:
        torch.testing.assert_close(one, expected, atol=1e-4, rtol=0)
