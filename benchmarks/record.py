"""Cost of recording rollouts, next to the training step that they are of."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from trinity_events.diagnostics.waits import NO_REPORTS
from trinity_schemas import Experience, StepRef, Turn
from trinity_workers.algorithms.batch import Batch
from trinity_workers.algorithms.collate import collate
from trinity_workers.config.sections.record import RecordConfig
from trinity_workers.config.train_config import RunConfig, TrainConfig
from trinity_workers.learning.policy import create_policy, load_policy
from trinity_workers.record.recorder import RolloutRecorder

from .environment import Stage
from .measure import Findings, Noise, Row, median, ratio, say, spread
from .report import SPEED

TITLE = "recording rollouts costs little next to the step that trains on them"
PLACE = SPEED

_SAMPLES = 4
"""Samples of a group."""


class Size(NamedTuple):
    """Samples of a step, their tokens, the rows that are computed with, rounds, and duration."""

    samples: int
    tokens: int
    computed: int
    rounds: int
    takes: str


SIZES = {
    "tiny": Size(16, 64, 8, 1, "5 s"),
    "small": Size(128, 1024, 8, 3, "1 min"),
    "full": Size(512, 4096, 8, 3, "4 min"),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure the time that a rank is held, and the time of its writer, step by step."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        create_policy(folder / "model", 0)
        groups = _make_groups(size)
        whole = collate(groups, 0)
        batch = replace(whole, advantages=torch.rand(whole.response_mask.shape))
        say(f"{size.samples} samples of {size.tokens} tokens; a step on {size.computed} of them")
        steps = [_time_step(folder / "model", batch, size) for _ in range(size.rounds)]
        blocked, written, used = _time_record(_make_config(folder), groups, batch, size.rounds)
    shown = f"{median(steps):,.3g} s"
    peer = f"forward and backward pass of 130,000 parameters on {size.computed} rows, scaled up"
    rows = [
        Row(
            what=what,
            figure=f"{median(seconds) * 1e3:,.3g} ms",
            peer=peer,
            peer_figure=shown,
            ratio=ratio(seconds, steps),
            spread=spread(seconds),
        )
        for what, seconds in (
            ("`sample`: the rank is held", blocked),
            ("processor time of the writer, at a low priority", used),
            ("`all`: from the end of the step to its file on disk", written),
        )
    ]
    notes = [
        f"A step has {size.samples} samples of {size.tokens} tokens in groups of {_SAMPLES}. All "
        "are recorded, with advantages and without the trainer's log-probabilities.",
        "The model is the smallest there is: any other takes longer for its step.",
    ]
    return Findings(rows, notes)


def _make_groups(size: Size) -> list[list[Experience]]:
    generator = torch.Generator().manual_seed(0)
    version = StepRef(1, 0)
    groups = []
    for ordinal in range(size.samples // _SAMPLES):
        group = []
        for sample in range(_SAMPLES):
            tokens = torch.randint(3, 90, (size.tokens,), generator=generator).tolist()
            answer = Turn(
                role="policy",
                tokens=tokens,
                logprobs=torch.rand(size.tokens, generator=generator).neg().tolist(),
                versions=[(version, size.tokens)],
            )
            group.append(
                Experience(
                    run_id="benchmark",
                    epoch=1,
                    ordinal=ordinal,
                    attempt=1,
                    sample=sample,
                    samples=_SAMPLES,
                    explorer="explorer-0",
                    turns=[Turn(role="prompt", tokens=[5, 6, 7]), answer],
                    reward=float(sample),
                )
            )
        groups.append(group)
    return groups


def _make_config(folder: Path) -> RunConfig:
    settings = TrainConfig(record=RecordConfig(rollouts="sample", groups_per_step=2**20))
    return settings.placed(
        run_id="benchmark",
        epoch=1,
        redis_url="redis://unused",
        weights_url="redis://unused",
        checkpoint_folder=folder,
    )


def _time_step(model_folder: Path, batch: Batch, size: Size) -> float:
    """Return the seconds of a forward and a backward pass of all rows, from those of some."""
    model: Any
    model, _ = load_policy(model_folder)
    began = time.perf_counter()
    for row in range(size.computed):
        part = batch.rows(row, row + 1)
        logits = model(input_ids=part.input_ids, attention_mask=part.attention_mask).logits
        logits.float().log_softmax(-1).mean().backward()
    return (time.perf_counter() - began) * size.samples / size.computed


def _time_record(
    config: RunConfig, groups: Sequence[Sequence[Experience]], batch: Batch, rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds that the rank is held, until the file is written, and of the writer."""
    blocked, written, used = [], [], []
    for step in range(1, rounds + 1):
        recorder = RolloutRecorder(config, 0, NO_REPORTS)
        recorder.add(1, groups[:1], None)  # it has started
        recorder.wait_recorded(1)
        own = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        began = time.perf_counter()
        recorder.add(step + 1, groups, batch)
        blocked.append(time.perf_counter() - began)
        recorder.wait_recorded(step + 1)
        written.append(time.perf_counter() - began)
        recorder.close()
        assert not recorder.counts.dropped_samples
        used.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - own)
    return blocked, written, used
