"""Peak memory and time of a micro-batch's forward and backward pass, with whole logits or without.

Log-probabilities and entropies of the same tokens and models in two ways:

- fused: from the last hidden states, a chunk of tokens at a time (``trainer.fused_loss``);
- plain: from the logits of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .environment import Stage
from .measure import Findings, Noise, Row, median, ratio, say, spread, taking_turns
from .rank_processes import Methods, measure, measured
from .replay import megabytes
from .report import MEGATRON

if TYPE_CHECKING:
    import torch

    from trinity_workers.algorithms.batch import Batch

TITLE = "a pass over a micro-batch, with its logits in memory a chunk at a time"
PLACE = MEGATRON

VOCABULARY = 16_384
HIDDEN = 64
COLUMNS = 128
"""Response tokens of a row."""
RANKS = {"FSDP, one rank": 1, "Megatron, TP 2": 2}


class Size(NamedTuple):
    """Rows of the micro-batches, engines, rounds, and the expected duration."""

    rows: tuple[int, ...]
    engines: tuple[str, ...]
    rounds: int
    takes: str


SIZES = {
    "tiny": Size((1,), ("FSDP, one rank",), 1, "20 s"),
    "small": Size((16,), tuple(RANKS), 1, "1 min"),
    "full": Size((16, 32), tuple(RANKS), 2, "3 min"),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure both ways, on micro-batches of several sizes, on every engine."""
    del on  # it needs no server
    rows = []
    for engine in size.engines:
        for count in size.rows:
            noise.beat()
            say(f"  {count * COLUMNS} tokens on {engine}")
            on_rank = partial(measure_all, engine=engine, rows=count, rounds=size.rounds)
            rows += rows_of(engine, count, measured(RANKS[engine], write_policy, on_rank))
    return Findings(
        rows,
        [
            f"A Qwen2 of two layers and {VOCABULARY:,} tokens on CPUs, float32, a thread each; "
            "log-probabilities with entropies, forward and backward. Medians of rounds that take "
            "turns.",
            "Memory is rank 0's largest resident set above what it was before, the gradients of "
            "the parameters included; the largest of all rounds.",
        ],
    )


def rows_of(engine: str, count: int, methods: Methods) -> list[Row]:
    """Return rows that compare fused with plain."""
    fused, plain = methods["fused"], methods["plain"]
    bytes_fused, bytes_plain = (
        max(measurement.peak for measurement in each) for each in (fused, plain)
    )
    seconds = [[measurement.seconds for measurement in each] for each in (fused, plain)]
    where = f"{count * COLUMNS:,} tokens, {megabytes(fused[0].model)} of logits a rank, {engine}"
    return [
        Row(
            what=f"memory, {where}",
            figure=megabytes(bytes_fused),
            peer="plain",
            peer_figure=megabytes(bytes_plain),
            ratio=bytes_fused / bytes_plain,
        ),
        Row(
            what=f"seconds, {where}",
            figure=f"{median(seconds[0]):.2f}",
            peer="plain",
            peer_figure=f"{median(seconds[1]):.2f}",
            ratio=ratio(*seconds),
            spread=spread(seconds[0]),
        ),
    ]


def write_policy(folder: Path) -> None:
    """Write a random policy with a large vocabulary."""
    from transformers import AutoConfig, Qwen2ForCausalLM

    from trinity_workers.learning.policy import create_policy, save_policy

    create_policy(folder, seed=0)
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size, config.hidden_size = VOCABULARY, HIDDEN
    config.max_position_embeddings = 2 * COLUMNS
    save_policy(Qwen2ForCausalLM(config), folder)


def micro_batch(rows: int) -> Batch:
    """Return rows of one token of prompt and full responses."""
    import torch

    from trinity_workers.algorithms.batch import Batch

    lot = torch.Generator().manual_seed(0)
    return Batch(
        input_ids=torch.randint(3, VOCABULARY, (rows, 1 + COLUMNS), generator=lot),
        attention_mask=torch.ones(rows, 1 + COLUMNS, dtype=torch.int64),
        position_ids=torch.arange(1 + COLUMNS).repeat(rows, 1),
        response_mask=torch.ones(rows, COLUMNS, dtype=torch.bool),
        groups=torch.arange(rows),
        rewards=torch.zeros(rows),
        finished=torch.ones(rows, dtype=torch.bool),
    )


def loss(current: Any, _: Any = None) -> tuple[torch.Tensor, None]:
    """Return a loss that all statistics have a part in."""
    return (-current.logprobs - 0.01 * current.entropy).mean(), None


def fsdp_pass(folder: Path) -> Callable[..., int]:
    """Return a pass over a batch on FSDP, which returns the bytes of the logits."""
    import torch

    from trinity_workers.engines.fsdp import FSDPEngine
    from trinity_workers.learning.logprobs import response_statistics

    engine = FSDPEngine(folder, device=torch.device("cpu"), learning_rate=1e-6)

    def once(batch: Batch, *, fused: bool) -> int:
        statistics = response_statistics(engine.module, batch, entropy=True, fused=fused)
        engine.accumulate(loss(statistics)[0], first=True, last=True)
        return batch.response_mask.numel() * VOCABULARY * 4

    return once


def megatron_pass(folder: Path) -> Callable[..., int]:
    """Return a pass over a batch on Megatron, where the ranks share the vocabulary."""
    import torch
    import torch.distributed as dist

    from trinity_workers.engines.megatron import MegatronEngine, OptimizerOptions, ParallelLayout
    from trinity_workers.engines.megatron.training import Statistics, accumulate_gradients

    ranks = dist.get_world_size()
    engine = MegatronEngine(
        folder,
        device=torch.device("cpu"),
        layout=ParallelLayout(tensor=ranks),
        optimizer=OptimizerOptions(learning_rate=1e-6),
    )

    def once(batch: Batch, *, fused: bool) -> int:
        for chunk in engine.module:
            chunk.zero_grad_buffer()
        statistics = Statistics(VOCABULARY, temperature=1.0, entropy=True, fused=fused)
        accumulate_gradients(engine.module, [batch], loss, statistics)
        return batch.response_mask.numel() * VOCABULARY * 4 // ranks

    return once


def measure_all(
    rank: int, place: str, folder: str, *, engine: str, rows: int, rounds: int
) -> Methods:
    """Measure both ways on one rank. Collective."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS[engine])
    once = (fsdp_pass if engine.startswith("FSDP") else megatron_pass)(Path(folder))
    batch = micro_batch(rows)
    for fused in (True, False):
        once(micro_batch(1), fused=fused)  # warm-up
    contenders = {
        name: partial(measure, partial(once, batch, fused=fused))
        for name, fused in (("fused", True), ("plain", False))
    }
    methods = taking_turns(contenders, rounds, Noise())
    dist.destroy_process_group()
    return methods
