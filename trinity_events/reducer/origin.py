"""Which epoch made a checkpoint's folder: its mark names the staged folder that it was."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..core import final_name
from ..core.completeness import STAGING
from .checkpoint_files import MARKER

_LONGEST = 4096
"""Bytes of a mark that are read; it names one path."""
_STAGED = re.compile(rf"{re.escape(STAGING)}/epoch_(\d{{1,18}})_step_(\d{{1,18}})_[0-9a-f]+")


class Origin(NamedTuple):
    """What a checkpoint was saved as; None where its staged folder has another kind of name."""

    epoch: int | None
    step: int


def made_in(folder: Path, steps: Iterable[int]) -> dict[int, int | None]:
    """Return the steps of a run's folder with the epoch that each was made in, where it is told."""
    found: dict[int, int | None] = {}
    for step in steps:
        origin = origin_of(folder / final_name(step))
        found[step] = None if origin is None else origin.epoch
    return found


def origin_of(folder: Path) -> Origin | None:
    """Return what a folder was saved as; None for one that has never been a checkpoint's."""
    try:
        mark = os.open(folder / MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        told = _STAGED.fullmatch(os.read(mark, _LONGEST).decode(errors="replace"))
    except OSError:
        return None
    finally:
        os.close(mark)
    return Origin(int(told[1]), int(told[2])) if told else Origin(None, 0)
