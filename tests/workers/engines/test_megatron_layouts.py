"""Every layout of Megatron takes the steps of plain torch, and the comparison sees faults."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tests.support import megatron_ranks as at
from tests.support.megatron_steps import (
    ADAMW,
    LIMIT,
    RATE,
    differences,
    plain_steps,
    take_steps,
)
from trinity_workers.engines.megatron import (
    LayoutRefused,
    OptimizerOptions,
    ParallelLayout,
)

pytestmark = [pytest.mark.megatron, pytest.mark.heavy]

TOLERANCE = 1e-4
"""Of numbers near 1 and 5: float32, summed in another order."""
SHORT = [
    (4, ParallelLayout(tensor=2, context=2, sequence_parallel=True), "qwen3"),
    (2, ParallelLayout(context=2, expert=2), "qwen2-moe"),
    (2, ParallelLayout(tensor=2, sequence_parallel=True), "deepseek"),
    (2, ParallelLayout(expert=2), "moonlight"),
]
DEEPSEEK = [
    (2, ParallelLayout(pipeline=2), "deepseek"),
    (2, ParallelLayout(context=2), "deepseek"),
    (2, ParallelLayout(expert=2), "deepseek"),
    (2, ParallelLayout(pipeline=2, virtual=2), "moonlight"),
    (2, ParallelLayout(tensor=2, sequence_parallel=True), "moonlight"),
    (4, ParallelLayout(tensor=2, expert=2, sequence_parallel=True), "deepseek"),
    (8, ParallelLayout(tensor=2, pipeline=2, context=2, sequence_parallel=True), "moonlight"),
]


def layouts(ranks: int) -> Iterator[tuple[int, ParallelLayout, str]]:
    """Yield the layouts of so many ranks that can be, each with a model that has their parts."""
    for tensor, pipeline, context, expert, sequence in product(
        (1, 2), (1, 2), (1, 2, 4), (1, 2, 4), (False, True)
    ):
        layout = ParallelLayout(
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            sequence_parallel=sequence,
        )
        try:
            layout.check(ranks)
        except LayoutRefused:
            continue
        yield ranks, layout, "qwen2-moe" if expert > 1 else "qwen3"


LONG = [layout for ranks in (2, 4, 8) for layout in layouts(ranks) if layout not in SHORT]
LONG += DEEPSEEK


@pytest.fixture(scope="module")
def batches():
    return [at.padded_batch(seed, rows=8) for seed in range(2)]


@pytest.fixture(scope="module")
def plain(megatron_folder, batches):
    """The plain steps of a model, each computed once."""
    made = {}

    def steps(name: str):
        if name not in made:
            made[name] = plain_steps(megatron_folder(name), batches)
        return made[name]

    return steps


@pytest.mark.parametrize(
    "is_distributed",
    [
        pytest.param(False, id="ordinary"),
        pytest.param(True, id="distributed", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(
    ("world", "layout", "name"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.nightly) for case in LONG)],
)
def test_a_layout_takes_the_steps_of_plain_torch(
    engine_ranks, batches, plain, world, layout, name, is_distributed
):
    optimizer = OptimizerOptions(learning_rate=RATE, adamw=ADAMW, distributed=is_distributed)
    # Either kind of loss with either kind of optimizer, so that no layout is run four times.
    options = {"fused_loss": is_distributed, "recompute": is_distributed}
    ranks = engine_ranks(name, world, layout, optimizer, options)
    worst = differences(ranks(take_steps, batches), plain(name))
    assert max(worst.values()) < TOLERANCE, worst
    assert plain(name)[0][0].norm > 2 * LIMIT, "the gradients were clipped"


# --- faults that the comparison must see --------------------------------------------------------


def leave_norms_alone(patch) -> None:
    """The gradients of norms are not summed over the ranks of a sequence."""
    from trinity_workers.engines.megatron.local_layers import LocalNorm

    create = LocalNorm.__init__

    def unmarked(self, *args, **options):
        create(self, *args, **options)
        self.weight.sequence_parallel = False

    patch.setattr(LocalNorm, "__init__", unmarked)


def keep_rank_order(patch) -> None:
    """Keys and values are in the order of the ranks."""
    from trinity_workers.engines import context_parallel

    patch.setattr(context_parallel, "_chunks_by_rank", lambda ranks: list(range(2 * ranks)))


def sum_losses(patch) -> None:
    """A rank takes the gradients of all ranks' losses, which are the same."""
    from trinity_workers.engines.context_parallel import SequenceShare, gather_sequence

    def gather(self, values):
        whole = gather_sequence(values.transpose(0, 1), self._group, sum_gradients=True)
        return whole.transpose(0, 1)

    patch.setattr(SequenceShare, "gather", gather)


def take_consecutive_positions(patch) -> None:
    """Rotary positions are those of a consecutive part of the sequence."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    def part(embedding, dim, group):
        return embedding.chunk(group.size(), dim=dim)[group.rank()]

    patch.setattr(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", part)


def keep_own_key_gradients(patch) -> None:
    """The gradients of keys and values are not summed over the ranks."""
    from trinity_workers.engines import context_parallel

    gather = context_parallel.gather_sequence

    def without_sum(values, group, **_):
        return gather(values, group)

    patch.setattr(context_parallel, "gather_sequence", without_sum)


def keep_own_position_gradients(patch) -> None:
    """The gradients of keys' rotary parts are those of a rank's own heads."""
    from trinity_workers.engines.megatron.deepseek import latent_attention

    attention = latent_attention()
    create = attention.__init__

    def without_hook(self, *args, **options):
        create(self, *args, **options)
        self.linear_kv_down_proj._forward_hooks.clear()

    patch.setattr(attention, "__init__", without_hook)


def mutate(rank, mutant) -> None:
    patch = pytest.MonkeyPatch()
    mutant(patch)
    rank.exits.callback(patch.undo)


MUTANTS = {
    leave_norms_alone: (ParallelLayout(tensor=2, sequence_parallel=True), "qwen3"),
    keep_rank_order: (ParallelLayout(context=2), "qwen3"),
    sum_losses: (ParallelLayout(context=2), "qwen3"),
    take_consecutive_positions: (ParallelLayout(context=2), "qwen3"),
    keep_own_key_gradients: (ParallelLayout(context=2), "qwen3"),
    keep_own_position_gradients: (ParallelLayout(tensor=2, sequence_parallel=True), "deepseek"),
}


@pytest.mark.nightly(
    "workers/engines/test_megatron_layouts.py::test_a_layout_takes_the_steps_of_plain_torch"
)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_sees_a_fault(rank_group, megatron_folder, batches, plain, mutant):
    ranks = rank_group(2)
    ranks(mutate, mutant)
    optimizer = OptimizerOptions(learning_rate=RATE, adamw=ADAMW)
    layout, name = MUTANTS[mutant]
    ranks(at.make_engine, megatron_folder(name), layout, optimizer)
    worst = differences(ranks(take_steps, batches), plain(name))
    assert max(worst.values()) > 10 * TOLERANCE, worst
    if mutant is sum_losses:
        del worst["norm before clipping"]
        assert max(worst.values()) < TOLERANCE, "clipping and AdamW hide a factor"
