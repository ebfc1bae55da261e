"""Cost of the verification of a checkpoint, next to the load that it comes before."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from trinity_events.checkpoints.manifest import (
    saved_files,
    sums_below,
    usable_cores,
    write_manifest,
)
from trinity_workers.engines.state_files import copied, read_state, write_state
from trinity_workers.storage.load_verification import verify_checkpoint

from .environment import Stage
from .measure import Findings, Noise, Row, median, ratio, say, spread, taking_turns
from .report import SPEED

TITLE = "a checkpoint is verified before it is loaded"
PLACE = SPEED

_FILES = ("model", "exp_avg", "exp_avg_sq", "other")
"""Shards of equal size: a file is digested by one thread, and several files side by side."""
_TENSOR = 16 << 20
"""Bytes of a tensor, as a matrix of a small model has."""
_PIECE = 1 << 20
FULL, SIZES_ALONE = "verify: full", "verify: size"
LOAD, READ = "torch.load, and a copy of each tensor", "reading the files alone"


class Size(NamedTuple):
    """Sizes of the checkpoints in MiB, the rounds of each, and the expected duration."""

    checkpoints: tuple[tuple[int, int], ...]
    takes: str


SIZES = {
    "tiny": Size(((64, 1),), "5 s"),
    "small": Size(((256, 3),), "30 s"),
    "full": Size(((256, 5), (2048, 5)), "2 min"),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure checkpoint by checkpoint; all files are in the page cache."""
    rows: list[Row] = []
    for mebibytes, rounds in size.checkpoints:
        with TemporaryDirectory() as folder:
            checkpoint = Path(folder)
            say(f"writing a checkpoint of {mebibytes} MiB")
            _write(checkpoint, mebibytes)
            contenders: dict[str, Callable[[], float]] = {
                FULL: partial(_timed, partial(verify_checkpoint, checkpoint)),
                SIZES_ALONE: partial(_timed, partial(verify_checkpoint, checkpoint, "size")),
                LOAD: partial(_timed, partial(_load, checkpoint)),
                READ: partial(_timed, partial(_read, checkpoint)),
            }
            rows += _rows(mebibytes, taking_turns(contenders, rounds, noise))
    notes = [
        f"Checkpoints have {len(_FILES)} files, which {usable_cores()} cores digest side by side.",
        "All files are in the page cache. Where the disk is slower than the digests, verification "
        "takes the time of the disk, and the load after it reads the page cache.",
    ]
    return Findings(rows, notes)


def _rows(mebibytes: int, seconds: dict[str, list[float]]) -> list[Row]:
    return [
        Row(
            what=f"{mebibytes} MiB, {ours}",
            figure=_format(None if ours == SIZES_ALONE else mebibytes, seconds[ours]),
            peer=peer,
            peer_figure=_format(mebibytes, seconds[peer]),
            ratio=ratio(seconds[ours], seconds[peer]),
            spread=spread(seconds[ours]),
        )
        for ours in (FULL, SIZES_ALONE)
        for peer in (LOAD, READ)
    ]


def _format(mebibytes: int | None, seconds: list[float]) -> str:
    speed = "" if mebibytes is None else f", {mebibytes / 1024 / median(seconds):,.3g} GiB/s"
    milliseconds = median(seconds) * 1e3
    digits = 0 if milliseconds >= 100 else 2
    return f"{milliseconds:,.{digits}f} ms{speed}"


def _write(folder: Path, mebibytes: int) -> None:
    for seed, name in enumerate(_FILES):
        torch.manual_seed(seed)
        count = max(1, (mebibytes << 20) // len(_FILES) // _TENSOR)
        state = {f"{number}.weight": torch.randn(_TENSOR // 4) for number in range(count)}
        write_state(folder / f"{name}.pt", state)
    write_manifest(folder, sums_below([folder], folder))


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _load(folder: Path) -> None:
    for name in saved_files(folder):
        copied(read_state(folder / name))


def _read(folder: Path) -> None:
    buffer = bytearray(_PIECE)
    for name in saved_files(folder):
        with (folder / name).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
