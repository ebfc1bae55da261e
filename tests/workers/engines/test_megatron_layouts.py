"""Every layout of Megatron takes the steps of plain torch, and the comparison sees faults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from transformers import AutoModelForCausalLM  # noqa: E402

from tests.support import megatron_ranks as at  # noqa: E402
from trinity_workers.engines.adamw import AdamWOptions  # noqa: E402
from trinity_workers.engines.megatron import (  # noqa: E402
    LayoutRefused,
    OptimizerOptions,
    ParallelLayout,
)

pytestmark = [pytest.mark.megatron, pytest.mark.heavy]

RATE, LIMIT = 1e-3, 0.01
"""Learning rate, and the norm to which gradients are clipped: less than any norm here."""
ADAMW = AdamWOptions(max_grad_norm=LIMIT)
TOLERANCE = 1e-4
"""Of numbers near 1 and 5: float32, summed in another order."""
SHORT = [
    (4, ParallelLayout(tensor=2, context=2, sequence_parallel=True), "qwen3"),
    (2, ParallelLayout(context=2, expert=2), "qwen2-moe"),
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


class Step(NamedTuple):
    """Numbers of a step: [B, R] both, the norm is before clipping."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    loss: float
    norm: float


def loss_of(logprobs, entropy, mask, rows: int, tokens: int):
    """A loss of whole responses, so that it is no sum over tokens, and of entropies."""
    ratios = (logprobs.sum(dim=1) / 5).exp() * mask.any(dim=1)
    return -ratios.sum() / rows - 0.1 * entropy.sum() / tokens


def take_steps(rank, batches) -> tuple[slice, list[Step | None], dict[str, torch.Tensor]]:
    """Take a step on each batch; return the replica's rows, the numbers and the weights."""
    engine = rank.objects.engine
    share, shares = at.data_rank()
    steps: list[Step | None] = []
    for batch in batches:
        size = len(batch) // shares
        rows = slice(size * share, size * (share + 1))
        count, tokens = len(batch), batch.token_count

        def loss(current, part, count=count, tokens=tokens):
            value = loss_of(current.logprobs, current.entropy, part.response_mask, count, tokens)
            return value * shares, (
                current.logprobs.detach(),
                current.entropy.detach(),
                value.detach(),
            )

        own = batch.rows(rows.start, rows.stop)
        parts, norm = engine.train_batch(own, loss, entropy=True)
        if not parts:  # before the last stage of a pipeline
            steps.append(None)
            continue
        logprobs, entropy, values = zip(*parts, strict=True)
        joined = [torch.cat(tensors)[:size] for tensors in (logprobs, entropy)]
        steps.append(Step(*joined, float(sum(values)), norm))
    return rows, steps, at.full_weights(rank)


def plain_steps(folder, batches) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """The same by Hugging Face's model and torch's AdamW: each row by itself, unpadded."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)
    steps = []
    for batch in batches:
        adamw.zero_grad()
        rows = []
        for row in range(len(batch)):
            real = batch.attention_mask[row].bool()
            count = int(batch.response_mask[row].sum())
            output = model(input_ids=batch.input_ids[row][real][None], use_cache=False)
            logs = output.logits[0].log_softmax(-1)[-count - 1 : -1]
            chosen = logs.gather(-1, batch.responses[row][:count, None])[:, 0]
            padding = (0, batch.response_width - count)
            statistics = (chosen, -(logs.exp() * logs).sum(-1))
            rows.append([torch.nn.functional.pad(numbers, padding) for numbers in statistics])
        logprobs, entropy = (torch.stack(numbers) for numbers in zip(*rows, strict=True))
        loss = loss_of(logprobs, entropy, batch.response_mask, len(batch), batch.token_count)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        adamw.step()
        steps.append(Step(logprobs.detach(), entropy.detach(), loss.item(), float(norm)))
    with TemporaryDirectory() as saved:  # in the names of files: experts are joined in memory
        model.save_pretrained(saved)
        return steps, at.in_folder(Path(saved))


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


def differences(answers, plain) -> dict[str, float]:
    """The largest difference of each kind, over all ranks and steps."""
    expected, expected_weights = plain
    largest: dict[str, float] = {}

    def compare(key: str, value: float) -> None:
        largest[key] = max(largest.get(key, 0.0), math.inf if math.isnan(value) else value)

    losses: dict[tuple[int, int], float] = {}
    for rows, steps, weights in answers:
        for number, step in enumerate(steps):
            if step is None:
                continue
            for key in ("logprobs", "entropy"):
                mine, theirs = getattr(step, key), getattr(expected[number], key)[rows]
                compare(key, float((mine - theirs).abs().max()))
            compare("norm before clipping", abs(step.norm / expected[number].norm - 1))
            losses[number, rows.start] = step.loss
        for name, value in weights.items():
            if not name.endswith("k_proj.bias"):  # its gradient is 0: AdamW follows the rounding
                compare("weights", float((value - expected_weights[name]).abs().max()))
    for number, step in enumerate(expected):
        total = sum(loss for (at_step, _), loss in losses.items() if at_step == number)
        compare("loss", abs(total - step.loss))
    return largest


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


def mutate(rank, mutant) -> None:
    patch = pytest.MonkeyPatch()
    mutant(patch)
    rank.exits.callback(patch.undo)


MUTANTS = {
    leave_norms_alone: ParallelLayout(tensor=2, sequence_parallel=True),
    keep_rank_order: ParallelLayout(context=2),
    sum_losses: ParallelLayout(context=2),
    take_consecutive_positions: ParallelLayout(context=2),
    keep_own_key_gradients: ParallelLayout(context=2),
}


@pytest.mark.nightly(
    "workers/engines/test_megatron_layouts.py::test_a_layout_takes_the_steps_of_plain_torch"
)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_sees_a_fault(rank_group, megatron_folder, batches, plain, mutant):
    ranks = rank_group(2)
    ranks(mutate, mutant)
    optimizer = OptimizerOptions(learning_rate=RATE, adamw=ADAMW)
    ranks(at.make_engine, megatron_folder("qwen3"), MUTANTS[mutant], optimizer)
    worst = differences(ranks(take_steps, batches), plain("qwen3"))
    assert max(worst.values()) > 10 * TOLERANCE, worst
    if mutant is sum_losses:
        del worst["norm before clipping"]
        assert max(worst.values()) < TOLERANCE, "clipping and AdamW hide a factor"
