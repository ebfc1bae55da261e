"""Time of a call to a worker group with 1,024 rows, compared with Ray's own.

Two ranks each get half of a batch and answer one field of it. Two peers make the same calls:

- arrays: bare Ray, with arrays that were cut before, whose answers are left as they come;
- tensors: Ray with the views that a split batch consists of, whose answers are concatenated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .environment import Stage
from .measure import Findings, Noise, Row, median, ratio, say, spread, taking_turns
from .report import MEGATRON

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trinity_workers.algorithms.batch import Batch
    from trinity_workers.worker_group.group import WorkerGroup

TITLE = "a call to a worker group with 1,024 rows, beside Ray's bare calls"
PLACE = MEGATRON

ROWS = 1024
RANKS = 2


class Size(NamedTuple):
    """Columns of prompts and of responses, calls of a round, rounds, and the expected duration."""

    columns: tuple[int, ...]
    calls: int
    rounds: int
    takes: str


SIZES = {
    "tiny": Size((64,), 3, 2, "20 s"),
    "small": Size((64, 512), 10, 3, "30 s"),
    "full": Size((64, 512), 20, 7, "1 min"),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure a call in every way, with short and with long rows."""
    del on  # it needs no server
    rows: list[Row] = []
    with started() as group:
        for columns in size.columns:
            say(f"  {columns} + {columns} columns")
            batch = make_batch(columns)
            ways = {name: partial(seconds, call, size.calls) for name, call in calls(group, batch)}
            seconds_by_way = taking_turns(ways, size.rounds, noise)
            megabytes = sum(tensor.nbytes for tensor in batch.known().values()) / 1e6
            rows += rows_of(f"{megabytes:.1f} MB", seconds_by_way)
    return Findings(
        rows,
        [
            f"{RANKS} ranks, each a Ray actor of one process. {ROWS:,} rows go out, and one of "
            f"their fields comes back. Medians of {size.rounds} rounds of {size.calls} calls."
        ],
    )


@contextmanager
def started() -> Iterator[WorkerGroup]:
    """Start Ray and the ranks, for the block."""
    import ray

    from trinity_workers.worker_group.group import WorkerGroup

    from .dispatch_worker import Answering

    ray.init("local", num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(Answering)
        yield WorkerGroup(Answering, [actor.remote(rank) for rank in range(RANKS)])
    finally:
        ray.shutdown()


def make_batch(columns: int) -> Batch:
    """Return a batch of random tokens with so many columns of prompt, and of response."""
    import torch

    from trinity_workers.algorithms.batch import Batch

    tokens = torch.randint(0, 1000, (ROWS, 2 * columns))
    return Batch(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        position_ids=torch.arange(2 * columns).repeat(ROWS, 1),
        response_mask=torch.ones(ROWS, columns, dtype=torch.bool),
        groups=torch.arange(ROWS),
        rewards=torch.zeros(ROWS),
        finished=torch.ones(ROWS, dtype=torch.bool),
        behaviour_logprobs=torch.randn(ROWS, columns),
    )


def calls(group: WorkerGroup, batch: Batch) -> list[tuple[str, Callable[[], Any]]]:
    """Return one call in every way; the first is ours."""
    import ray
    import torch

    workers, parts = group.workers, batch.equal_parts(RANKS)
    arrays = [{name: tensor.numpy() for name, tensor in part.known().items()} for part in parts]

    def of_group() -> Any:
        return asyncio.run(group.call("answer", batch))

    def of_arrays() -> Any:
        pairs = zip(workers, arrays, strict=True)
        return ray.get([worker.answer_bare.remote(part) for worker, part in pairs])

    def of_tensors() -> Any:
        pairs = zip(workers, batch.equal_parts(RANKS), strict=True)
        return torch.cat(
            ray.get([worker.answer_bare.remote(part.known()) for worker, part in pairs])
        )

    return [("group", of_group), ("arrays", of_arrays), ("tensors", of_tensors)]


def seconds(call: Callable[[], Any], count: int) -> float:
    """Return the mean seconds of a call, after one that is not counted."""
    call()
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def rows_of(size: str, seconds_by_way: dict[str, list[float]]) -> list[Row]:
    """Return rows that compare the group with each other way."""
    ours = seconds_by_way["group"]
    return [
        Row(
            what=f"milliseconds of a call, {size}",
            figure=f"{median(ours) * 1000:.1f}",
            peer=way,
            peer_figure=f"{median(theirs) * 1000:.1f}",
            ratio=ratio(ours, theirs),
            spread=spread(ours),
        )
        for way, theirs in seconds_by_way.items()
        if way != "group"
    ]
