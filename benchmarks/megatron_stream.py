"""Time and peak memory of a version's weights on rank 0 of a Megatron trainer.

Three methods provide every full tensor once on rank 0, copied into chunks as by a publisher:

- stream: one tensor at a time, as ``megatron_upload_state_dict`` does;
- dictionary: the same gathers, collected into one dictionary first, as Trinity-RFT does;
- objects: every rank's state dict pickled to rank 0, and merged there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .environment import Stage
from .measure import Findings, Noise, Row, say, taking_turns
from .rank_processes import Methods, measure, measured, rows_beside
from .replay import megabytes
from .report import MEGATRON

if TYPE_CHECKING:
    import torch

TITLE = "a version's weights on rank 0 of a Megatron trainer, by how they get there"
PLACE = MEGATRON

MODELS = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128},
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408},
    "large": {"hidden_size": 1024, "num_hidden_layers": 16, "intermediate_size": 2816},
}
LAYOUTS = {"TP 2": (2, 1), "PP 2": (1, 2)}
"""Tensor and pipeline parallelism of each layout."""
RANKS = 2
VOCABULARY = 16_384
CHUNK_BYTES = 4 << 20


class Size(NamedTuple):
    """Models, layouts, rounds, and the expected duration."""

    models: tuple[str, ...]
    layouts: tuple[str, ...]
    rounds: int
    takes: str


SIZES = {
    "tiny": Size(("tiny",), ("TP 2",), 2, "10 s"),
    "small": Size(("small",), ("TP 2", "PP 2"), 3, "1 min"),
    "full": Size(("small", "large"), ("TP 2", "PP 2"), 5, "4 min"),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure every method, on models of several sizes, in every layout."""
    del on  # it needs no server
    rows = []
    for model in size.models:
        for layout in size.layouts:
            noise.beat()
            say(f"  {model} model at {layout}")
            on_rank = partial(measure_all, layout=layout, rounds=size.rounds)
            rows += rows_of(layout, measured(RANKS, partial(write_config, model), on_rank))
    return Findings(
        rows,
        [
            "Two ranks over Gloo, float32, a thread each. A Qwen3 whose embedding is tied and has "
            f"{VOCABULARY:,} rows. Medians of {size.rounds} rounds that take turns.",
            "Memory is rank 0's largest resident set above what it was before, the largest of all "
            "rounds.",
        ],
    )


def rows_of(layout: str, methods: Methods) -> list[Row]:
    """Return rows that compare the stream with each other method."""
    stream = methods["stream"]
    where = f"{megabytes(stream[0].model)} at {layout}"
    return [
        row
        for way, theirs in methods.items()
        if way != "stream"
        for row in rows_beside("a stream", where, stream, way, theirs)
    ]


def write_config(model: str, folder: Path) -> None:
    """Write the folder of a Qwen3 of this size, without weights."""
    from transformers import Qwen3Config

    sizes = MODELS[model]
    Qwen3Config(
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["num_hidden_layers"],
        intermediate_size=sizes["intermediate_size"],
        vocab_size=VOCABULARY,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=sizes["hidden_size"] // 8,
        tie_word_embeddings=True,
    ).save_pretrained(folder)


def consume(tensors: Iterable[tuple[str, torch.Tensor]], chunk: torch.Tensor) -> int:
    """Copy every tensor into a chunk, as a part's writer does; return the bytes."""
    import torch

    total = 0
    for _, tensor in tensors:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK_BYTES):
            piece = flat[start : start + CHUNK_BYTES]
            chunk[: piece.numel()].copy_(piece)
        total += flat.numel()
    return total


def stream(engine: Any, chunk: torch.Tensor) -> int:
    """Consume one tensor at a time."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        return consume(engine.get_per_tensor_param(), chunk)
    return sum(tensor.nbytes for _, tensor in engine.get_per_tensor_param())


def dictionary(engine: Any, chunk: torch.Tensor) -> int:
    """Collect all tensors on rank 0, then copy them."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        whole = {name: value.clone() for name, value in engine.get_per_tensor_param()}
        return consume(whole.items(), chunk)
    return sum(tensor.nbytes for _, tensor in engine.get_per_tensor_param())


def objects(engine: Any, chunk: torch.Tensor) -> int:
    """Pickle the shards to rank 0, merge the model there, then copy it."""
    import torch
    import torch.distributed as dist

    mine = [
        (shard.name, shard.offsets, shard.global_shape, shard.tensor)
        for shard in engine.local_shards()
    ]
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return 0
    whole: dict[str, torch.Tensor] = {}
    for shards in everyone:
        for name, offsets, shape, tensor in shards:
            target = whole.setdefault(name, torch.empty(shape, dtype=tensor.dtype))
            place = tuple(
                slice(at, at + count) for at, count in zip(offsets, tensor.shape, strict=True)
            )
            target[place] = tensor
    return consume(whole.items(), chunk)


WAYS: dict[str, Callable[[Any, torch.Tensor], int]] = {
    "stream": stream,
    "dictionary": dictionary,
    "objects": objects,
}


def measure_all(rank: int, place: str, folder: str, *, layout: str, rounds: int) -> Methods:
    """Measure every method on one rank. Collective."""
    import torch
    import torch.distributed as dist

    tensor, pipeline = LAYOUTS[layout]
    engine = random_engine(rank, place, folder, tensor, pipeline)
    buffer = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
    for _ in engine.get_per_tensor_param():
        pass  # warm-up
    contenders = {
        name: partial(measure, partial(way, engine, buffer)) for name, way in WAYS.items()
    }
    methods = taking_turns(contenders, rounds, Noise())
    dist.destroy_process_group()
    return methods


def random_engine(rank: int, place: str, folder: str, tensor: int, pipeline: int) -> Any:
    """Join the process group; return the rank's engine, with random weights. Collective."""
    import torch
    import torch.distributed as dist

    from trinity_workers.engines.megatron import MegatronEngine, ParallelLayout

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    engine = MegatronEngine(
        Path(folder),
        device=torch.device("cpu"),
        layout=ParallelLayout(tensor=tensor, pipeline=pipeline),
        load_weights=False,
    )
    for chunk in engine.module:
        for parameter in chunk.parameters():
            parameter.data.normal_()
    return engine
