"""Section `task`: questions, and environments of their episodes."""

from __future__ import annotations

from typing import Any

import msgspec

from ...section import Section
from ...tasks.settings import TrainingSet
from ..types import Seconds


class TaskConfig(Section, frozen=True, kw_only=True):
    """Questions, and the environment of episodes with several turns."""

    name: str = "spell-backward"
    """Task: a built-in one, an entry point, `module:attribute` or `./file.py:attribute`."""
    questions: str | None = None
    """Source of the questions: a JSONL or Parquet file, `reasoning-gym:NAME` or `datasets:NAME`.
    Null takes those of the task itself."""
    sets: dict[str, TrainingSet] = msgspec.field(default_factory=dict)
    """Sets of questions by name that are mixed by their weights, instead of one source."""
    prompt: str = "prompt"
    """Field of a question's record that holds the prompt: text, or a list of chat messages. It may
    be a path, such as `extra_info.question`."""
    answer: str | None = "answer"
    """Field of a question's record that holds the right answer, for the reward. It may be a path,
    such as `reward_model.ground_truth`. Null if no record has one."""
    environment: str | None = None
    """Environment of episodes with several turns, `module:attribute` or `./file.py:attribute`.
    Null ends each episode after the policy's first turn."""
    environment_deadline: Seconds = 30.0
    """Seconds that one reply of the environment may take; its process is ended after them."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options that are given to the task by name."""

    @property
    def has_questions(self) -> bool:
        """Return True if the questions are of sources, and not of the task that is named."""
        return self.questions is not None or bool(self.sets)
