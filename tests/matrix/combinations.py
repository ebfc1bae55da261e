"""Combinations of engine, sync method and style that the matrix runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import msgspec

from trinity_workers.config.rules.table import find_contradictions
from trinity_workers.config.sections.sync import SyncConfig, SyncMethod, SyncStyle
from trinity_workers.config.sections.trainer import EngineName
from trinity_workers.config.train_config import TrainConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {"interval": 2, "offset": 1},
    "trainer_driven": {},
    "explorer_driven": {"max_staleness": 2},
    "fully_async": {"max_staleness": 2},
}
"""Settings of a style in short runs, in which its property differs from every other style's."""


class Combination(NamedTuple):
    """One run of the matrix."""

    engine: EngineName
    method: SyncMethod
    style: SyncStyle

    @property
    def name(self) -> str:
        """Name of the run, and of its result."""
        return f"{self.engine}-{self.method}-{self.style}"

    @property
    def sync(self) -> dict[str, Any]:
        """Section ``sync`` of the run's configuration."""
        return {"method": self.method, "style": self.style, **SETTINGS[self.style]}


def combinations() -> Iterator[Combination]:
    """Yield every allowed combination on FSDP, and each method once on Megatron."""
    for method in get_args(SyncMethod):
        for style in get_args(SyncStyle):
            combination = Combination("fsdp", method, style)
            sync = msgspec.convert(combination.sync, SyncConfig)
            if not any(find_contradictions(TrainConfig(sync=sync), str)):
                yield combination
    for method in get_args(SyncMethod):
        yield Combination("megatron", method, "trainer_driven")
