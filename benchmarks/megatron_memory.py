"""Bytes that a rank keeps from the forward to the backward pass, by how ranks share a sequence.

One training step of one long row, with the fused loss. Kept are the storages that autograd saves,
without the parameters. The peer is one rank with megatron-core's own attention, which has a weight
for each pair of tokens.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .environment import Stage
from .measure import Findings, Noise, Row, say
from .rank_processes import Measured, Methods, measured
from .replay import megabytes
from .report import MEGATRON

if TYPE_CHECKING:
    import torch

TITLE = "bytes of a long row that a rank keeps for its backward pass"
PLACE = MEGATRON

VOCABULARY = 512
LONGEST = 16_384
PEER = "megatron-core's attention, one rank"
LAYOUTS: dict[str, dict[str, Any]] = {
    PEER: {},
    "one rank": {},
    "CP 2": {"context": 2},
    "CP 4": {"context": 4},
    "TP 2": {"tensor": 2},
    "TP 2 with SP": {"tensor": 2, "sequence_parallel": True},
    "TP 2 x CP 2 with SP": {"tensor": 2, "context": 2, "sequence_parallel": True},
}
"""Sizes of the layout by name."""


class Size(NamedTuple):
    """Columns of the rows, layouts beside the peer, and the expected duration."""

    columns: tuple[int, ...]
    layouts: tuple[str, ...]
    takes: str


SIZES = {
    "tiny": Size((256,), ("CP 2",), "30 s"),
    "small": Size((2048,), tuple(LAYOUTS)[1:], "2 min"),
    "full": Size((4096,), tuple(LAYOUTS)[1:], "4 min"),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure every layout on rows of several lengths."""
    del on  # it needs no server
    rows = []
    for columns in size.columns:
        bytes_by_layout: dict[str, int] = {}
        for layout in (PEER, *size.layouts):
            noise.beat()
            say(f"  {columns} columns: {layout}")
            on_rank = partial(measure_step, layout=layout, columns=columns)
            [measurement] = measured(rank_count(layout), write_policy, on_rank)["step"]
            bytes_by_layout[layout] = measurement.peak
        rows += [
            Row(
                what=f"bytes kept of {columns:,} columns, {layout}",
                figure=megabytes(bytes_by_layout[layout]),
                peer=PEER,
                peer_figure=megabytes(bytes_by_layout[PEER]),
                ratio=bytes_by_layout[layout] / bytes_by_layout[PEER],
            )
            for layout in size.layouts
        ]
    return Findings(
        rows,
        [
            "A Qwen3 of two layers, width 256 and eight heads on CPUs, float32, one row, the fused "
            "loss, without recomputation. Rank 0's bytes; they depend on no timing.",
            "CP divides the row, and a rank gathers the keys and values of all of it in each "
            "layer. SP divides what TP ranks would each have a whole copy of.",
        ],
    )


def rank_count(layout: str) -> int:
    """Return the ranks of a layout."""
    sizes = LAYOUTS[layout]
    return int(sizes.get("tensor", 1) * sizes.get("context", 1))


def write_policy(folder: Path) -> None:
    """Write a random policy for long rows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trinity_workers.learning.policy import create_policy, save_policy

    create_policy(folder, seed=0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    save_policy(Qwen3ForCausalLM(config), folder)


def measure_step(rank: int, place: str, folder: str, *, layout: str, columns: int) -> Methods:
    """Take a step; return the bytes that this rank keeps in it. Collective."""
    import torch
    import torch.distributed as dist

    from trinity_workers.algorithms.batch import Batch
    from trinity_workers.engines.megatron import (
        MegatronEngine,
        ModelOptions,
        OptimizerOptions,
        ParallelLayout,
    )

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=rank_count(layout))
    if layout == PEER:
        keep_attention_of_megatron_core()
    engine = MegatronEngine(
        Path(folder),
        device=torch.device("cpu"),
        layout=ParallelLayout(**LAYOUTS[layout]),
        optimizer=OptimizerOptions(learning_rate=1e-6),
        model=ModelOptions(fused_loss=True),
    )
    tokens = torch.randint(3, VOCABULARY, (1, columns), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        position_ids=torch.arange(columns)[None],
        response_mask=torch.ones(1, columns - 1, dtype=torch.bool),
        groups=torch.zeros(1, dtype=torch.int64),
        rewards=torch.zeros(1),
        finished=torch.ones(1, dtype=torch.bool),
    )
    parameters = {
        parameter.untyped_storage().data_ptr()
        for chunk in engine.module
        for parameter in chunk.parameters()
    }
    saved_bytes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.train_batch(batch, lambda current, _: (-current.logprobs.mean(), None))
    dist.destroy_process_group()
    return {"step": [Measured(seconds=0.0, peak=sum(saved_bytes.values()), model=0)]}


def keep_attention_of_megatron_core() -> None:
    """Let models be built with megatron-core's attention, as without this project's."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from trinity_workers.engines.megatron import model
    from trinity_workers.engines.megatron.local_layers import use_local_layers

    def use_other_attention(block: Any) -> None:
        use_local_layers(block)
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = DotProductAttention

    vars(model)["use_local_layers"] = use_other_attention
