"""What a version's weights cost rank 0 of a Megatron trainer: time and peak memory.

Three ways to have every full tensor once on rank 0, copied into chunks as a publisher does:

- stream: one tensor at a time, as ``megatron_upload_state_dict`` does;
- dictionary: the same gathers, collected into one dictionary first, as Trinity-RFT does;
- objects: every rank's state dict pickled to rank 0, and merged there.

Usage: python -m benchmarks.megatron_stream [--size small|large ...] [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3Config

SIZES = {
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408},
    "large": {"hidden_size": 1024, "num_hidden_layers": 16, "intermediate_size": 2816},
}
LAYOUTS = {"tensor 2": {"tensor": 2}, "pipeline 2": {"pipeline": 2}}
CHUNK_BYTES = 4 << 20
MIB = 1 << 20


def config(size: str) -> Qwen3Config:
    """A Qwen3 of the size."""
    return Qwen3Config(
        **SIZES[size],
        vocab_size=16384,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=SIZES[size]["hidden_size"] // 8,
        tie_word_embeddings=True,
    )


def consume(tensors: Iterable[tuple[str, torch.Tensor]], chunk: torch.Tensor) -> int:
    """Copy every tensor into a chunk, as a part's writer does; returns the bytes."""
    total = 0
    for _, tensor in tensors:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK_BYTES):
            piece = flat[start : start + CHUNK_BYTES]
            chunk[: piece.numel()].copy_(piece)
        total += flat.numel()
    return total


def stream(engine: Any, chunk: torch.Tensor) -> int:
    """One tensor at a time."""
    if dist.get_rank() == 0:
        return consume(engine.get_per_tensor_param(), chunk)
    return sum(tensor.nbytes for _, tensor in engine.get_per_tensor_param())


def dictionary(engine: Any, chunk: torch.Tensor) -> int:
    """All of them on rank 0, then the copies."""
    if dist.get_rank() == 0:
        whole = {name: value.clone() for name, value in engine.get_per_tensor_param()}
        return consume(whole.items(), chunk)
    return sum(tensor.nbytes for _, tensor in engine.get_per_tensor_param())


def objects(engine: Any, chunk: torch.Tensor) -> int:
    """Pickled shards, then the merged model, then the copies."""
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
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def measure(run: Callable[[], int]) -> tuple[float, int, int]:
    """Seconds, peak resident bytes above those before, and what it returns."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    dist.barrier()
    began = time.perf_counter()
    total = run()
    dist.barrier()
    return time.perf_counter() - began, max(0, resident("VmHWM") - before), total


def rank_main(rank: int, place: str, folder: str, layout: str, rounds: int, answer: Any) -> None:
    """Measure on one rank; rank 0 answers."""
    from trinity_workers.engines.megatron import MegatronEngine, ParallelLayout

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    engine = MegatronEngine(
        Path(folder),
        device=torch.device("cpu"),
        layout=ParallelLayout(**LAYOUTS[layout]),
        load_weights=False,
    )
    for chunk in engine.module:
        for parameter in chunk.parameters():
            parameter.data.normal_()
    buffer = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
    for _ in engine.get_per_tensor_param():
        pass  # warm
    rows = {}
    for name, way in WAYS.items():
        found = [measure(lambda way=way: way(engine, buffer)) for _ in range(rounds)]
        rows[name] = {
            "seconds": statistics.median(one[0] for one in found),
            "seconds_spread": [min(one[0] for one in found), max(one[0] for one in found)],
            "peak_bytes": max(one[1] for one in found),
            "model_bytes": found[0][2],
        }
    if rank == 0:
        answer.send_bytes(json.dumps(rows).encode())
    dist.destroy_process_group()


def run(size: str, layout: str, rounds: int) -> dict[str, Any]:
    """Every way at one size and layout."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        config(size).save_pretrained(folder)
        ours, theirs = context.Pipe()
        place = Path(folder, "meeting-place").as_uri()
        ranks = [
            context.Process(target=rank_main, args=(rank, place, folder, layout, rounds, theirs))
            for rank in range(2)
        ]
        for one in ranks:
            one.start()
        found = json.loads(ours.recv_bytes())
        for one in ranks:
            one.join()
    return {"size": size, "layout": layout, "ways": found}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.megatron_stream", description=__doc__
    )
    parser.add_argument("--size", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    results = [run(size, layout, given.rounds) for size in given.size for layout in LAYOUTS]
    if given.json:
        print(json.dumps(results, indent=2))
        return
    for one in results:
        model = one["ways"]["stream"]["model_bytes"] / MIB
        print(f"{one['size']} ({model:.0f} MiB), {one['layout']}:")
        for name, row in one["ways"].items():
            low, high = row["seconds_spread"]
            peak = row["peak_bytes"] / MIB
            print(
                f"  {name:<10} {row['seconds']:6.2f} s ({low:.2f} to {high:.2f}), "
                f"{peak:6.0f} MiB more on rank 0"
            )


if __name__ == "__main__":
    main()
