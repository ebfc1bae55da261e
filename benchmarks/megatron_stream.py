"""Time and peak memory of a version's weights on rank 0 of a Megatron trainer.

Three methods provide every full tensor once on rank 0, copied into chunks as by a publisher:

- stream: one tensor at a time, as ``megatron_upload_state_dict`` does;
- dictionary: the same gathers, collected into one dictionary first, as Trinity-RFT does;
- objects: every rank's state dict pickled to rank 0, and merged there.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct

from .environment import Stage
from .measure import Findings, Noise, Row, median, ratio, say, spread, taking_turns
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
VOCABULARY = 16_384
CHUNK_BYTES = 4 << 20
PAGE_BYTES = 4096
DEADLINE = 600.0
"""Maximum seconds for the ranks to process one model in one layout."""


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


class Measured(Struct, frozen=True):
    """Measurement of one round of one method, on rank 0."""

    seconds: float
    peak: int
    """Bytes of resident memory in excess of those before."""
    model: int
    """Bytes of all tensors."""


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure every method, on models of several sizes, in every layout."""
    del on  # it needs no server
    rows = []
    for model in size.models:
        for layout in size.layouts:
            noise.beat()
            say(f"  {model} model at {layout}")
            rows += rows_of(layout, measured(model, layout, size.rounds))
    return Findings(
        rows,
        [
            "Two ranks over Gloo, float32, a thread each. A Qwen3 whose embedding is tied and has "
            f"{VOCABULARY:,} rows. Medians of {size.rounds} rounds that take turns.",
            "Memory is rank 0's largest resident set above what it was before, the largest of all "
            "rounds.",
        ],
    )


def rows_of(layout: str, found: dict[str, list[Measured]]) -> list[Row]:
    """Return rows that compare the stream with each other method."""
    stream, model = found["stream"], megabytes(found["stream"][0].model)
    rows = []
    for way, theirs in found.items():
        if way == "stream":
            continue
        mine_s, theirs_s = ([one.seconds for one in each] for each in (stream, theirs))
        mine_b, theirs_b = (max(one.peak for one in each) for each in (stream, theirs))
        rows += [
            Row(
                what=f"seconds of a stream, {model} at {layout}",
                figure=f"{median(mine_s):.3f}",
                peer=way,
                peer_figure=f"{median(theirs_s):.3f}",
                ratio=ratio(mine_s, theirs_s),
                spread=spread(mine_s),
            ),
            Row(
                what=f"memory of a stream, {model} at {layout}",
                figure=megabytes(mine_b),
                peer=way,
                peer_figure=megabytes(theirs_b),
                ratio=mine_b / theirs_b,
                spread=spread([one.peak for one in stream]),
            ),
        ]
    return rows


def measured(
    model: str, layout: str, rounds: int, measure_on_rank: Callable[..., Any] | None = None
) -> dict[str, list[Measured]]:
    """Return rank 0's measurements of every method, by a function that each rank runs."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        write_config(model, Path(folder))
        ours, theirs = context.Pipe()
        place = Path(folder, "meeting-place").as_uri()
        ranks = [
            context.Process(
                target=rank_main,
                args=(
                    theirs,
                    rank,
                    partial(measure_on_rank or measure_all, rank, place, folder, layout, rounds),
                ),
            )
            for rank in range(2)
        ]
        try:
            for one in ranks:
                one.start()
            theirs.close()  # so that the pipe closes when both ranks end
            if not ours.poll(DEADLINE):
                raise TimeoutError(f"the ranks said nothing for {DEADLINE:g} s")
            return msgspec.json.decode(ours.recv_bytes(), type=dict[str, list[Measured]])
        finally:
            for one in ranks:
                one.join(10)
                one.kill()


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

    mine = [(one.name, one.offsets, one.global_shape, one.tensor) for one in engine.local_shards()]
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


def resident(field: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def measure(once: Callable[[], int]) -> Measured:
    """Run a method once on all ranks; return the measurement of this rank."""
    import torch.distributed as dist

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    dist.barrier()
    began = time.perf_counter()
    model = once()
    dist.barrier()
    seconds = time.perf_counter() - began
    # The resolution is one page.
    return Measured(seconds, max(PAGE_BYTES, resident("VmHWM") - before), model)


def rank_main(answer: Any, rank: int, measure_on_rank: Callable[[], Any]) -> None:
    """Measure on one rank; rank 0 sends the results."""
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere if rank else sys.stderr):
        found = measure_on_rank()
    if rank == 0:
        answer.send_bytes(msgspec.json.encode(found))


def measure_all(
    rank: int, place: str, folder: str, layout: str, rounds: int
) -> dict[str, list[Measured]]:
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
    found = taking_turns(contenders, rounds, Noise())
    dist.destroy_process_group()
    return found


def random_engine(rank: int, place: str, folder: str, tensor: int, pipeline: int) -> Any:
    """Join the process group; return the rank's engine, with random weights. Collective."""
    import torch
    import torch.distributed as dist

    from trinity_workers.engines.megatron import MegatronEngine, ParallelLayout

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
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
