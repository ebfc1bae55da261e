"""Documents that the commands of the workers print with ``--json``."""

from __future__ import annotations

from typing import Any

from .config.train_config import TrainConfig
from .conversion.convert import Conversion
from .explorer import ExplorationResult
from .launch.results import RunFailure
from .launch.summary import DemoSummary

DOCUMENTS: dict[str, Any] = {
    "convert": Conversion,
    "demo": (DemoSummary, RunFailure),
    "explorer": ExplorationResult | None,
    "train": (DemoSummary, RunFailure),
    "train-check": TrainConfig,
}
"""Type of each document, or types, by command and option."""
