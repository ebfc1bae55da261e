"""Names of the files of a record, and which of them are current. No I/O but listing the folder.

::

    RUN/rollouts/                              for the run's user alone
      epoch_EPOCH_from_STEP                    mark: the epoch resumed at this step
      step_STEP_epoch_EPOCH_rank_RANK.parquet  samples that one rank was given in a step
      step_STEP_epoch_EPOCH_discarded_PART.parquet  answers that came for it, and no step trained on

1. A file gets its name once it is whole and on disk.
2. A file is current unless a later epoch began at an earlier step: its step was then taken again,
   or is lost with the weights that it made.
3. A step that several ranks trained on has a file of each. Discarded answers have parts, as a step
   may have discarded more than fits into memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

RECORD = "rollouts"
"""Folder of the record in a run's directory."""

# At most 18 digits, which fit into the 64 bits of the columns.
_FILE = re.compile(r"step_(\d{1,18})_epoch_(\d{1,18})_(rank|discarded)_(\d{1,9})\.parquet")
_MARK = re.compile(r"epoch_(\d{1,18})_from_(\d{1,18})")


class RecordFile(NamedTuple):
    """File with samples of a step. The order is that of their age."""

    epoch: int
    step: int
    rank: int
    """Rank that was given the samples, or number of the part of discarded ones."""
    is_discarded: bool = False

    @property
    def name(self) -> str:
        """Name of the file."""
        kind = "discarded" if self.is_discarded else "rank"
        return f"step_{self.step}_epoch_{self.epoch}_{kind}_{self.rank}.parquet"


class EpochMark(NamedTuple):
    """Mark of an epoch that recorded."""

    epoch: int
    resumed_step: int
    """Step of the checkpoint that it began with; 0 for the initial policy."""

    @property
    def name(self) -> str:
        """Name of the empty file."""
        return f"epoch_{self.epoch}_from_{self.resumed_step}"


class RecordedStep(NamedTuple):
    """Files of a step."""

    step: int
    epoch: int
    files: tuple[RecordFile, ...]
    """Those of the samples that it was trained on."""
    is_current: bool
    """False if a later epoch resumed from before the step."""
    discarded: tuple[RecordFile, ...] = ()
    """Those of answers that came for it, and that no step trained on."""


def parse_file_name(name: str) -> RecordFile | None:
    """Parse the name of a file; None for any other name."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    return RecordFile(int(match[2]), int(match[1]), int(match[4]), match[3] == "discarded")


def parse_mark_name(name: str) -> EpochMark | None:
    """Parse the name of an epoch's mark; None for any other name."""
    match = _MARK.fullmatch(name)
    return EpochMark(int(match[1]), int(match[2])) if match else None


def find_steps(names: Iterable[str]) -> list[RecordedStep]:
    """Return the recorded steps of a folder with these names, in the order of their training."""
    names = list(names)
    marks = [mark for name in names if (mark := parse_mark_name(name)) is not None]
    files: dict[tuple[int, int], list[RecordFile]] = defaultdict(list)
    for name in names:
        if (file := parse_file_name(name)) is not None:
            files[file.epoch, file.step].append(file)
    return [
        RecordedStep(
            step,
            epoch,
            tuple(sorted(file for file in files[epoch, step] if not file.is_discarded)),
            _is_current(epoch, step, marks),
            tuple(sorted(file for file in files[epoch, step] if file.is_discarded)),
        )
        for epoch, step in sorted(files)
    ]


def _is_current(epoch: int, step: int, marks: Iterable[EpochMark]) -> bool:
    # The step of the checkpoint itself is kept: the later epoch begins after it.
    return not any(mark.epoch > epoch and mark.resumed_step < step for mark in marks)


def list_names(folder: Path) -> list[str]:
    """Return the names in a record's folder; none if there is no folder."""
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
