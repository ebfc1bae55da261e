"""Training on megatron-core: every layout learns what one rank learns."""

from __future__ import annotations

import copy
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.waits import wait_until  # noqa: E402
from trinity_workers.engines.learning_rate import LearningRate  # noqa: E402
from trinity_workers.engines.megatron import HybridEngine, OptimizerOptions, ParallelLayout  # noqa: E402
from trinity_workers.learning.finite import nested_tensors  # noqa: E402
from trinity_workers.learning.logprobs import response_logprobs  # noqa: E402

pytestmark = pytest.mark.megatron

STEPS = 20
TOLERANCE = 1e-4
"""Of a loss near 5: sums of float32 are taken in another order, and AdamW magnifies that."""
BFLOAT16 = {"dtype": torch.bfloat16}
ROUNDED = 0.03
"""Of a loss near 5 whose activations have eight bits."""

CASES = [
    (2, ParallelLayout(tensor=2), {"recompute": True}, {}),
    (2, ParallelLayout(pipeline=2), {}, {}),
    (2, ParallelLayout(), {}, {"distributed": True}),
    (4, ParallelLayout(tensor=2, pipeline=2), {}, {}),
]
MORE_CASES = [
    (2, ParallelLayout(tensor=2), {}, {}),
    (2, ParallelLayout(pipeline=2), {"recompute": True}, {}),
    (2, ParallelLayout(), {}, {}),
    (2, ParallelLayout(), {"recompute": True}, {}),
    (4, ParallelLayout(tensor=2, pipeline=2), {"recompute": True}, {}),
    (4, ParallelLayout(tensor=2), {}, {"distributed": True}),
]


def optimizer(**values) -> OptimizerOptions:
    return OptimizerOptions(learning_rate=LearningRate(highest=3e-3, warmup_steps=4), **values)


@pytest.fixture(scope="module")
def batches():
    return [at.padded_batch(step % 4, rows=8) for step in range(STEPS)]


@pytest.fixture(scope="module")
def losses_alone(rank_processes, megatron_folder, batches):
    """The losses of one rank, by model and options; each is trained once."""
    made = {}

    def losses(name: str, **options) -> list[float]:
        key = (name, *options.items())
        if key not in made:
            ranks = rank_processes.group(1)
            ranks(at.make_engine, megatron_folder(name), ParallelLayout(), optimizer(), options)
            [made[key]] = ranks(at.train, batches)
            rank_processes.leave()
        return made[key]

    return losses


def losses_of(ranks, batches, layout: ParallelLayout) -> list[list[float]]:
    """The losses of the ranks that have them."""
    rank_losses = [losses for losses in ranks(at.train, batches) if any(losses)]
    assert len(rank_losses) == ranks.world // layout.pipeline
    return rank_losses


@pytest.mark.parametrize(
    ("world", "layout", "options", "values"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE_CASES)],
)
def test_losses_follow_those_of_one_rank_for_twenty_steps(
    losses_alone, batches, engine_ranks, world, layout, options, values
):
    alone = losses_alone("qwen3")
    assert alone[-1] < alone[0] - 0.3, "there was something to learn"
    ranks = engine_ranks("qwen3", world, layout, optimizer(**values), options)
    for losses in losses_of(ranks, batches, layout):
        assert losses == pytest.approx(alone, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3-moe", ParallelLayout(expert=2)),
        pytest.param("qwen3-moe", ParallelLayout(pipeline=2), marks=pytest.mark.nightly),
        pytest.param("qwen2-moe", ParallelLayout(expert=2), marks=pytest.mark.nightly),
    ],
)
def test_a_mixture_of_experts_learns_what_it_does_on_one_rank(
    losses_alone, batches, engine_ranks, name, layout
):
    alone = losses_alone(name)
    assert alone[-1] < alone[0] - 0.3, "there was something to learn"
    ranks = engine_ranks(name, 2, layout, optimizer())
    for losses in losses_of(ranks, batches, layout):
        assert losses == pytest.approx(alone, abs=TOLERANCE)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tensor=2),
        pytest.param(ParallelLayout(pipeline=2), marks=pytest.mark.nightly),
    ],
)
def test_bfloat16_learns_what_float32_does(losses_alone, batches, engine_ranks, layout):
    ranks = engine_ranks("qwen3", 2, layout, optimizer(), BFLOAT16)
    for losses in losses_of(ranks, batches, layout):
        assert losses == pytest.approx(losses_alone("qwen3", **BFLOAT16), abs=ROUNDED)
        assert losses == pytest.approx(losses_alone("qwen3"), abs=ROUNDED)


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        pytest.param("qwen2", 2, ParallelLayout(tensor=2), marks=pytest.mark.nightly),
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
    outputs = [output for output in ranks(at.logprobs, batch) if output is not None]
    assert outputs
    for output in outputs:
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=0)


def spoil_one_step(rank, batches, spoiled_rank: int) -> tuple[list[float], bool]:
    """Take three steps, the second on a loss that is infinite on one rank's last stage.

    Returns the norms, and True if parameters, optimizer and schedule stayed as they were.
    """
    engine = rank.objects.engine
    norms, states = [], []
    for number, batch in enumerate(batches):

        def loss(current, _, number=number):
            value = -current.logprobs.mean()
            is_bad = number == 1 and rank.number == spoiled_rank
            return value + (math.inf if is_bad else 0.0), None

        norms.append(engine.train_batch(batch, loss)[1])
        optimizer = [
            chained.optimizer.state_dict() for chained in engine.optimizer.chained_optimizers
        ]
        parameters = [
            parameter.detach() for chunk in engine.module for parameter in chunk.parameters()
        ]
        tensors = [tensor for _, tensor in nested_tensors([parameters, optimizer])]
        states.append((copy.deepcopy(tensors), engine.steps, engine.learning_rate))
    (first, *counts), (other, *others) = states[:2]
    same = all(torch.equal(mine, its) for mine, its in zip(first, other, strict=True))
    return norms, same and counts == others and states[2][1] == 2


@pytest.mark.parametrize(
    ("name", "layout", "values", "options"),
    [
        pytest.param("qwen3", ParallelLayout(), {}, BFLOAT16, marks=pytest.mark.nightly),
        ("qwen3", ParallelLayout(), {"distributed": True}, {}),
        ("qwen3", ParallelLayout(pipeline=2), {}, {}),
        pytest.param("qwen3", ParallelLayout(tensor=2), {}, {}, marks=pytest.mark.nightly),
        ("qwen3-moe", ParallelLayout(expert=2), {}, {}),
    ],
)
def test_a_loss_that_is_not_finite_on_one_rank_is_no_step_on_any(
    engine_ranks, batches, name, layout, values, options
):
    ranks = engine_ranks(name, 2, layout, optimizer(**values), options)
    # Of tensor-parallel ranks each has the same loss; one alone is not finite here.
    for norms, is_unchanged in ranks(spoil_one_step, batches[:3], 1):
        assert math.isfinite(norms[0])
        assert not math.isfinite(norms[1])
        assert math.isfinite(norms[2])
        assert is_unchanged


def train_and_drop_engines(rank, batches, *make_options) -> None:
    """Train and drop an engine twice, and wait until the threads of its groups have ended."""
    at.drop_engine(rank)
    before = at.count_gloo_threads()
    for _ in range(2):
        at.make_engine(rank, *make_options)
        at.train(rank, batches)
        threads = at.count_gloo_threads()
        hybrid = HybridEngine(rank.objects.engine, tensor=2)
        assert at.count_gloo_threads() > threads > before + 2, "groups have threads with such names"
        del hybrid
        at.drop_engine(rank)
        # Threads of groups before this test may end meanwhile.
        wait_until(lambda: at.count_gloo_threads() <= before, "an engine's groups have threads")


def test_an_engine_that_is_gone_has_no_threads(rank_group, megatron_folder, batches):
    ranks = rank_group(2)
    # This optimizer's shards of float32 parameters referred to all groups of the engine.
    options = (megatron_folder("qwen3"), ParallelLayout(), optimizer(distributed=True))
    ranks(train_and_drop_engines, batches[:1], *options)
