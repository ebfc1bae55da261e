"""The pytest plugin: one fixture. Nothing but pytest is imported until a test asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .pipeline import Pipeline


@pytest.fixture
def trinity_pipeline(tmp_path: Path) -> Pipeline:
    """A pipeline in memory, to be entered: ``async with trinity_pipeline as run:``."""
    from .pipeline import Pipeline

    return Pipeline("test", checkpoint_folder=tmp_path / "checkpoints")
