"""All rules of a configuration, in the order in which they are reported."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from ...algorithms.rules import get_defaults
from ...rules import FormatField, OnlyWhen, Rule, SettingConflict, Values
from ..train_config import TrainConfig
from . import algorithm, checkpoints, evaluation, model, rewards, rollouts, sync, trainer

RULES: tuple[Rule, ...] = (
    *trainer.RULES,
    *rollouts.RULES,
    *model.RULES,
    *checkpoints.RULES,
    *algorithm.RULES,
    *rewards.RULES,
    *sync.RULES,
    *evaluation.RULES,
)
"""Rules of a run."""
SET_RULES: tuple[Rule, ...] = (*rewards.SET_RULES, *evaluation.SET_RULES)
"""Rules of each set of questions, to train on or to measure on."""


def find_contradictions(config: TrainConfig, named: FormatField) -> Iterator[SettingConflict]:
    """Yield what contradicts itself in a configuration.

    Args:
        config: The configuration.
        named: Formats a field, given by its path, for the sentences.
    """
    values = make_values(config, named)
    for rule in RULES:
        yield from rule.find(values)
    # The rules of sets, once for each: NAME in their paths is then this set.
    for rules, sections in (
        (rewards.SET_RULES, config.task.sets),
        (evaluation.SET_RULES, config.evaluation.sets),
    ):
        for section in sections:
            values = make_values(config, named, section)
            for rule in rules:
                yield from rule.find(values)


def make_values(config: TrainConfig, named: FormatField, *section: str) -> Values:
    """Return the values of a configuration, whose defaults are those of its preset."""
    # A value of the preset was not set by the user, who need not take it back.
    defaults = structs.replace(TrainConfig(), algorithm=get_defaults(config.algorithm.preset))
    return Values(config, defaults, named, *section)


def find_conditions(path: str) -> list[str]:
    """Return the conditions under which a setting has an effect; none if it always has one.

    Settings in them are in braces.
    """
    return [
        rule.condition.text
        for rule in (*RULES, *SET_RULES)
        if isinstance(rule, OnlyWhen) and path in rule.paths
    ]
