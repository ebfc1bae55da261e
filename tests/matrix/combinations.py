"""Combinations of engine, sync method and style that the matrix runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import msgspec

from trinity_workers.config.rules.table import find_contradictions
from trinity_workers.config.sections.explorer import ExplorerConfig
from trinity_workers.config.sections.sync import SyncConfig, SyncMethod, SyncStyle
from trinity_workers.config.sections.trainer import EngineName, TrainerConfig
from trinity_workers.config.train_config import TrainConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {"interval": 2, "offset": 1},
    "trainer_driven": {},
    "explorer_driven": {"max_staleness": 2},
    "fully_async": {"max_staleness": 2},
}
"""Settings of a style in short runs, in which its property differs from every other style's."""


ROLLOUT_ENGINES = ("huggingface", "vllm")


class Combination(NamedTuple):
    """One run of the matrix."""

    engine: EngineName
    method: SyncMethod
    style: SyncStyle
    rollouts: str = "huggingface"
    """Rollout engine of the explorers."""

    @property
    def name(self) -> str:
        """Name of the run, and of its result."""
        name = f"{self.engine}-{self.method}-{self.style}"
        return name if self.rollouts == "huggingface" else f"{self.rollouts}-{name}"

    @property
    def package(self) -> str:
        """Package that its explorers need."""
        return "vllm" if self.rollouts == "vllm" else "transformers"

    @property
    def sync(self) -> dict[str, Any]:
        """Section ``sync`` of the run's configuration."""
        return {"method": self.method, "style": self.style, **SETTINGS[self.style]}


def combinations() -> Iterator[Combination]:
    """Yield every allowed combination on FSDP, and each method once on Megatron."""
    for rollouts in ROLLOUT_ENGINES:
        for method in get_args(SyncMethod):
            for style in get_args(SyncStyle):
                yield from _allowed(Combination("fsdp", method, style, rollouts))
        for method in get_args(SyncMethod):
            yield from _allowed(Combination("megatron", method, "trainer_driven", rollouts))


def _allowed(combination: Combination) -> Iterator[Combination]:
    """Yield the combination, unless a rule of the settings refuses it."""
    config = TrainConfig(
        sync=msgspec.convert(combination.sync, SyncConfig),
        trainer=TrainerConfig(engine=combination.engine),
        explorer=ExplorerConfig(engine=combination.rollouts),
    )
    if not any(find_contradictions(config, str)):
        yield combination
