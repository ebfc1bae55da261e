"""Questions, answers, and the protocols of a user's task, reward and environment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

Message: TypeAlias = dict[str, Any]
"""Chat message: `role`, `content`, and what else the chat template knows."""


class Question(Struct, frozen=True, kw_only=True):
    """One question: the prompt as the model sees it, the right answer, and other data.

    It travels to the processes of rewards, so `answer` and `data` are of JSON's
    types.
    """

    prompt: str | list[Message]
    """Text, or chat messages, to which the tokenizer's chat template is applied."""
    answer: Any = None
    data: dict[str, Any] = {}
    set: str = ""
    """Name of the set that it is of, where several are mixed; else empty."""

    def messages(self) -> list[Message]:
        """Return the prompt as chat messages; a text is the user's."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return list(self.prompt)


class Answer(Struct, frozen=True, kw_only=True):
    """The policy's answer to a question, as a reward function gets it."""

    text: str
    """Text of the policy's last turn, without its end-of-sequence token."""
    finished: bool
    """False if the last turn met its limit of tokens."""
    messages: list[Message]
    """The whole episode, from the prompt on, as chat messages."""
    tokens: int
    """Number of tokens that the policy sampled, over all turns."""


@runtime_checkable
class Task(Protocol):
    """A deterministic, endless order of questions, and some that are never trained on.

    A task may have `reward` (see :data:`RewardFunction`) as an attribute; a run's configuration
    may name another.
    """

    @property
    def name(self) -> str:
        """Name that people know it by."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest (`sha256:...`) of all that it asks, and of the order in which it does."""
        ...

    def question(self, ordinal: int) -> Question:
        """Return the question at a place in the order, which goes on for ever.

        The same ordinal has the same question in every process.
        """
        ...

    def held_out(self, count: int) -> list[Question]:
        """Return at most `count` questions that are never trained on, always the same ones."""
        ...


RewardFunction: TypeAlias = Callable[
    [Question, Answer],
    float | Mapping[str, float] | Awaitable[float | Mapping[str, float]],
]
"""Reward of an answer: a number, or named numbers of which `reward` is learned from.

The others are shown beside it. The function may be a coroutine function.
"""
