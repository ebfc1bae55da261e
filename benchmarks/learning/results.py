"""Results of runs, one file each."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct


class Measured(Struct, frozen=True, kw_only=True):
    """One measurement on held-out questions."""

    step: int
    exact: float
    """Share of sampled answers that are exactly right, with their end."""
    rewarded: float
    """Share of them that the task rewards."""
    answers: int


class LearningResult(Struct, frozen=True, kw_only=True):
    """Result of one run."""

    name: str
    family: str
    way: str
    seed: int
    settings: str
    """The run's file, as it was."""
    curve: list[Measured]
    staleness: float | None
    """Mean over the steps, in optimizer steps; None without the pipeline."""
    warm_up_steps: int
    step_seconds: float | None = None
    """Mean seconds of a training step; None without the pipeline, and in older results."""


class Results:
    """Folder with a file for each run that is finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> LearningResult | None:
        """Return the result of a run; None if it has not finished."""
        try:
            content = self._path(name).read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(content, type=LearningResult)

    def write(self, result: LearningResult) -> None:
        """Write the result, whole or not at all."""
        path = self._path(result.name)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        temporary.replace(path)

    def settings_file(self, name: str) -> Path:
        """Return the path of the run's settings."""
        return self.folder / f"{name}.yaml"

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"
