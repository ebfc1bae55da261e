"""Records of rollouts, as the writing process writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from trinity_events.record.files import RECORD
from trinity_events.record.reader import RolloutRecord
from trinity_schemas import Experience, encode
from trinity_workers.record.messages import StepRows, WriterSettings
from trinity_workers.record.writer import RecordWriter


def write_record(
    folder: Path,
    model_folder: Path,
    steps: Mapping[int, Sequence[Sequence[Experience]]],
    *,
    epoch: int = 1,
    resumed_step: int = 0,
) -> RolloutRecord:
    """Write a run's record with these groups of each step; advantages count up from 0."""
    writer = RecordWriter(
        WriterSettings(
            run_id=folder.name,
            epoch=epoch,
            resumed_step=resumed_step,
            folder=str(folder / RECORD),
            model_folder=str(model_folder),
            rank=0,
            ranks=1,
            max_bytes=2**30,
            max_steps=100,
        )
    )
    for step, groups in steps.items():
        samples = [sample for group in groups for sample in group]
        width = max(sum(len(turn.tokens) for turn in sample.turns[1:]) for sample in samples)
        numbers = np.arange(len(samples) * width, dtype=np.float32)
        rows = StepRows(
            step=step,
            experiences=[encode(sample) for sample in samples],
            width=width,
            advantages=numbers.tobytes(),
        )
        writer.write(rows)
    return RolloutRecord(folder, folder.name)
