"""Filter of the prompts that are longer than a run allows, before they are requested.

As veRL's ``data.filter_overlong_prompts`` does, it leaves such prompts out instead of cutting them
off. Unlike there, their ordinals stay in the order of the task: each has the fate ``overlong``, so
that the order does not depend on the tokenizer, and the audit counts them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import anyio.to_thread

from trinity_events.errors import TrinityError

from ..config.errors import BadSettings
from ..learning.policy import encode_prompt, load_tokenizer, make_built_in_tokenizer
from ..tasks import Question, Task
from .held_out_sets import HeldOutSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..config.train_config import TrainConfig

MOST_OVERLONG = 1000
"""Overlong prompts in a row that end a run whose task has no length: one pass of the others."""

logger = logging.getLogger(__name__)


class PromptsOverlong(BadSettings):
    """Prompts are longer than ``rollouts.max_prompt_tokens``, and cannot be left out.

    Attributes:
        fault: ``none-fits`` if no prompt of a task is short enough. ``held-out`` if questions of an
            evaluation set are too long: without them its results would be of another set.
        name: Name of the task, or of the evaluation set.
        overlong: Number of the prompts that are too long.
        shortest: Tokens of the shortest of them.
        limit: Value of the setting.
    """

    fault: Literal["none-fits", "held-out"]
    name: str
    overlong: int
    shortest: int
    limit: int
    texts: ClassVar = {
        "none-fits": "none of {overlong} prompts of {name} fits into rollouts.max_prompt_tokens: "
        "{limit}; the shortest has {shortest} tokens: allow more",
        "held-out": "{overlong} questions of evaluation.sets.{name} are longer than "
        "rollouts.max_prompt_tokens: {limit}; the shortest of them has {shortest} tokens: allow "
        "more, or take them out of the set",
    }


def load_filter(
    config: TrainConfig, folder: Path | None, task: Task, sets: Iterable[HeldOutSet]
) -> PromptFilter:
    """Load the tokenizer, and return the filter of a run's prompts once it is checked.

    Args:
        config: The run, which has ``rollouts.max_prompt_tokens``.
        folder: Folder of its policy; None for the built-in one.
        task: Its task.
        sets: Its sets of held-out questions, none of which may have an overlong prompt.

    Raises:
        BadPolicy: The tokenizer cannot be loaded.
        PromptsOverlong: No prompt fits, or one of the held-out questions does not.
    """
    tokenizer = make_built_in_tokenizer() if folder is None else load_tokenizer(folder)
    prompts = PromptFilter(config, task, tokenizer)
    prompts.check(sets)
    return prompts


class PromptFilter:
    """Filter of a task's prompts by their tokens.

    Args:
        config: The run, which has ``rollouts.max_prompt_tokens``.
        task: Its task.
        tokenizer: The policy's tokenizer.
    """

    def __init__(self, config: TrainConfig, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        assert config.rollouts.max_prompt_tokens is not None
        self.limit = config.rollouts.max_prompt_tokens
        self._task = task
        self._tokenizer = tokenizer
        self._template_kwargs = config.rollouts.chat_template_kwargs
        # One pass of a task with a length; a task without one could be overlong for ever.
        self._most = len(task) if isinstance(task, Sized) else MOST_OVERLONG
        self._in_a_row = 0
        self._shortest = 0
        self._has_warned = False

    def check(self, sets: Iterable[HeldOutSet]) -> None:
        """Check that a prompt fits, and all questions of the evaluation sets do.

        Raises:
            PromptsOverlong: if not.
        """
        # The trainer warns of the first prompt that it drops; an error says more than that.
        self._has_warned = True
        ordinal = 0
        # It ends: after a whole pass of overlong prompts find_overlong() raises.
        while self.find_overlong([ordinal]):
            ordinal += 1
        self._has_warned = False
        for held_out in sets:
            counts = [self._count_tokens(question) for question in held_out.questions]
            if overlong := [tokens for tokens in counts if tokens > self.limit]:
                raise PromptsOverlong(
                    "held-out", held_out.name, len(overlong), min(overlong), self.limit
                )

    def find_overlong(self, ordinals: Sequence[int]) -> list[int]:
        """Return the ordinals whose prompts are too long; log a warning of the first one.

        Raises:
            PromptsOverlong: All prompts of a pass over the task, one after the other, are too long.
        """
        overlong = []
        for ordinal in ordinals:
            tokens = self._count_tokens(self._task.question(ordinal))
            if tokens <= self.limit:
                # One prompt that fits clears the count: only a pass without any ends the run.
                self._in_a_row = 0
                continue
            overlong.append(ordinal)
            self._shortest = min(self._shortest, tokens) if self._in_a_row else tokens
            self._in_a_row += 1
            if self._in_a_row >= self._most:
                raise PromptsOverlong(
                    "none-fits", self._task.name, self._in_a_row, self._shortest, self.limit
                )
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the prompt of ordinal %d has %d tokens, above rollouts.max_prompt_tokens: %d; "
                    "it is dropped as overlong, and others will be",
                    *(ordinal, tokens, self.limit),
                )
        return overlong

    async def find_overlong_in_thread(self, ordinals: Sequence[int]) -> list[int]:
        """Do as :meth:`find_overlong` in a thread: a step may ask for thousands of prompts."""
        return await anyio.to_thread.run_sync(self.find_overlong, ordinals)

    def _count_tokens(self, question: Question) -> int:
        try:
            prompt = encode_prompt(
                self._tokenizer, question.prompt, template_kwargs=self._template_kwargs
            )
        except TrinityError:
            return 0  # Explorers report what the template refuses, as the failure of a request.
        return len(prompt)
