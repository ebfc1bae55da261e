"""Profiles of training steps: a trace file for each step and rank that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trinity_events.checkpoints.layout import profile_path
from trinity_schemas import ProfileWritten

from ...config.train_config import RunConfig

logger = logging.getLogger(__name__)


class StepProfiler:
    """Profiler of one rank's training steps, by ``trainer.profile_steps`` and ``profile_ranks``.

    Args:
        config: The run.
        role: Role of the rank.
        rank: Number of the rank.
        publish: Publishes the event that names a file.
    """

    def __init__(
        self, config: RunConfig, role: str, rank: int, publish: Callable[[ProfileWritten], object]
    ) -> None:
        ranks = config.trainer.profile_ranks
        is_profiled = ranks is None or rank in ranks
        self._steps = frozenset(config.trainer.profile_steps if is_profiled else ())
        self._run_folder = config.checkpoint_folder
        self._role, self._rank = role, rank
        self._publish = publish

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block, if it is a step that is asked for."""
        if number not in self._steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        named = record_function(f"training step {number}")
        # The file is written after the step, whose time it must not be part of.
        with profile(activities=activities) as profiler, named:
            yield
        path = profile_path(number, self._role, self._rank)
        file = self._run_folder / path
        try:
            write_trace(profiler, file)
        except (OSError, RuntimeError) as error:  # training goes on without it
            logger.warning("the profile of step %d is not written to %s: %s", number, file, error)
        else:
            self._publish(ProfileWritten(step=number, path=path, bytes=file.stat().st_size))


def write_trace(profiler: profile, file: Path) -> None:
    """Write a finished profiler's trace, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}")  # its ending tells the exporter to compress
    profiler.export_chrome_trace(str(unfinished))
    unfinished.replace(file)
