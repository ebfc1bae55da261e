"""Pytest plugin with one fixture, which imports the pipeline on first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .pipeline import Pipeline


@pytest.fixture
def trinity_pipeline(tmp_path: Path) -> Pipeline:
    """Return a pipeline in memory; enter it: ``async with trinity_pipeline as run:``."""
    from .pipeline import Pipeline

    return Pipeline("test", checkpoint_folder=tmp_path / "checkpoints")
