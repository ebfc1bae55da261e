"""Documents that the commands of the workers print with ``--json``."""

from __future__ import annotations

from typing import Any

from .config.train_config import TrainConfig
from .conversion.convert import Conversion
from .explorer import ExplorationResult
from .launch.results import Failure
from .launch.summary import DemoSummary

DOCUMENTS: dict[str, Any] = {
    "convert": Conversion,
    "demo": (DemoSummary, Failure),
    "explorer": ExplorationResult | None,
    "train": (DemoSummary, Failure),
    "train-check": TrainConfig,
    "trainer": (DemoSummary, Failure),
}
"""Type of each document, or types, by command and option."""
