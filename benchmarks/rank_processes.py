"""Ranks of a benchmark, each a process: what they measure, and rows that compare their methods."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from .measure import Row, median, ratio, spread
from .replay import megabytes

PAGE_BYTES = 4096
DEADLINE = 600.0
"""Maximum seconds for the ranks to process one case."""


class Measured(Struct, frozen=True):
    """Measurement of one round of one method, on rank 0."""

    seconds: float
    peak: int
    """Bytes of resident memory in excess of those before."""
    model: int
    """Bytes of what the method is given, such as all tensors."""


Methods = dict[str, list[Measured]]
"""Rounds by method."""


def measured(
    ranks: int,
    prepare: Callable[[Path], None],
    measure_on_rank: Callable[[int, str, str], Methods],
) -> Methods:
    """Return rank 0's measurements.

    Args:
        ranks: Number of processes.
        prepare: Function that writes to the folder that all ranks are given.
        measure_on_rank: Function that each rank runs, with its number, the URL of the place where
            the ranks meet, and the folder.

    Raises:
        TimeoutError: if rank 0 sends nothing within :data:`DEADLINE`.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        ours, theirs = context.Pipe()
        place = Path(folder, "meeting-place").as_uri()
        processes = [
            context.Process(target=_rank_main, args=(theirs, measure_on_rank, rank, place, folder))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            theirs.close()  # so that the pipe closes when all ranks end
            if not ours.poll(DEADLINE):
                raise TimeoutError(f"the ranks said nothing for {DEADLINE:g} s")
            return msgspec.json.decode(ours.recv_bytes(), type=Methods)
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def measure(once: Callable[[], int]) -> Measured:
    """Run a method once on all ranks; return the measurement of this rank."""
    import torch.distributed as dist

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident("VmRSS")
    dist.barrier()
    began = time.perf_counter()
    model = once()
    dist.barrier()
    seconds = time.perf_counter() - began
    # The resolution is one page.
    return Measured(seconds, max(PAGE_BYTES, _resident("VmHWM") - before), model)


def rows_beside(
    method: str, where: str, mine: list[Measured], peer: str, theirs: list[Measured]
) -> list[Row]:
    """Return a row of seconds and one of memory, of a method beside another one."""
    mine_s, theirs_s = ([measurement.seconds for measurement in each] for each in (mine, theirs))
    mine_b, theirs_b = (max(measurement.peak for measurement in each) for each in (mine, theirs))
    return [
        Row(
            what=f"seconds of {method}, {where}",
            figure=f"{median(mine_s):.3f}",
            peer=peer,
            peer_figure=f"{median(theirs_s):.3f}",
            ratio=ratio(mine_s, theirs_s),
            spread=spread(mine_s),
        ),
        Row(
            what=f"memory of {method}, {where}",
            figure=megabytes(mine_b),
            peer=peer,
            peer_figure=megabytes(theirs_b),
            ratio=mine_b / theirs_b,
            spread=spread([measurement.peak for measurement in mine]),
        ),
    ]


def _rank_main(
    answer: Any, measure_on_rank: Callable[[int, str, str], Methods], rank: int, *where: str
) -> None:
    """Measure on one rank; rank 0 sends the results."""
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere if rank else sys.stderr):
        methods = measure_on_rank(rank, *where)
    if rank == 0:
        answer.send_bytes(msgspec.json.encode(methods))


def _resident(field: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
