"""Settings of question sets that a run mixes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..section import Section


class TrainingSet(Section, frozen=True, kw_only=True):
    """A set of questions to train on, and its share of the questions that are asked."""

    questions: str | None = None
    """Source of the set's questions, as of `task.questions`. Every set needs one."""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """Share of the questions asked that are of this set, relative to the weights of the others."""
    prompt: str | None = None
    """Field of a record that holds the prompt. Null takes `task.prompt`."""
    answer: str | None = None
    """Field of a record that holds the right answer. Null takes `task.answer`."""
    source: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options of the set's source, over those of `task.options.source`."""
