"""Limits that a run's model and settings set to the answers of its explorers, for the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from trinity_events.rollouts import AnswerLimits

from ..tasks import is_built_in
from .train_config import RunConfig


def read_answer_limits(config: RunConfig, *, reward_part: str | None = None) -> AnswerLimits:
    """Return the limits of answers, of which those of the model are read from its folder.

    ``config.json`` is read as JSON: the trainer's process loads neither torch nor transformers. A
    limit that the file does not name is unknown, and none is checked.

    Args:
        config: The run.
        reward_part: Part of the reward that each answer needs.
    """
    model = _read_model_config(config.model_folder / "config.json")
    positions = _find_size(model, "max_position_embeddings")
    return AnswerLimits(
        vocabulary_size=_find_size(model, "vocab_size"),
        max_positions=None if positions is None else int(positions * _find_rope_factor(model)),
        max_turns=config.rollouts.max_turns,
        reward_part=reward_part,
        question_sets=_find_question_sets(config),
        error_score=config.rewards.error_score if config.rewards.on_error == "score" else None,
    )


def _find_question_sets(config: RunConfig) -> frozenset[str] | None:
    """Return the names of the run's sets of questions; None for those of a user's own task."""
    # A user's task names its sets by itself.
    is_known = config.task.has_questions or is_built_in(config.task.name)
    # Questions without a set, such as those of one source, have the empty name.
    return frozenset(("", *config.task.sets)) if is_known else None


def _read_model_config(path: Path) -> dict[str, Any]:
    try:
        model = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}  # The ranks, which load the model, raise a sentence about it.
    if not isinstance(model, dict):
        return {}
    # A model for several modalities has the sizes of its language model in a part.
    text = model.get("text_config")
    return {**model, **text} if isinstance(text, dict) else model


def _find_size(model: dict[str, Any], name: str) -> int | None:
    size = model.get(name)
    # Another value is not judged here: the ranks refuse the model.
    return size if isinstance(size, int) and size > 0 else None


def _find_rope_factor(model: dict[str, Any]) -> float:
    """Return the factor by which rotary embeddings stretch a model's positions; 1 without one."""
    scaling = model.get("rope_parameters") or model.get("rope_scaling")
    if not isinstance(scaling, dict):
        return 1.0
    # Of models whose kinds of layers differ, the parameters are by kind.
    by_kind = [kind for kind in scaling.values() if isinstance(kind, dict)]
    factors = [parameters.get("factor") for parameters in (scaling, *by_kind)]
    # The largest: a limit that is too low would refuse answers which the model can give.
    return max([1.0, *(float(factor) for factor in factors if isinstance(factor, int | float))])
