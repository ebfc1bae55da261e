"""Reports of rewards that failed: the error, with the answer that it failed for."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio.to_thread

from trinity_events.errors import TrinityError
from trinity_schemas import (
    ContractError,
    FailedDependency,
    RewardErrorReported,
    RolloutRequest,
)
from trinity_schemas.events import LONGEST_TRACEBACK

from ..tasks import Answer, Question
from .errors import RewardFailed
from .values import RewardFault

_LONGEST_PROMPT = 2000
_LONGEST_RESPONSE = 4000
"""Characters of an excerpt: of a longer text its beginning and its end, where its answer is."""
_LONGEST_QUOTE = 120
"""Characters of a response that the sentence of an error quotes."""
_REPORTED = 16
"""Causes that a process reports: as many as the state of a run keeps."""

logger = logging.getLogger(__name__)


class AnswersNotJudged(RewardFailed):
    """Raised if the reward of a request failed for some of its answers.

    Attributes:
        report: Report of the first error.
        dependency: What failed in place of the reward, if that is so for one of the answers.
    """

    report: RewardErrorReported
    dependency: FailedDependency | None = None
    text = "{_message}, for the answer {_quote!r}"

    @property
    def _message(self) -> str:
        return self.report.message.rstrip(".")

    @property
    def _quote(self) -> str:
        return _make_excerpt(" ".join(self.report.response.split()), _LONGEST_QUOTE)


def make_report(
    request: RolloutRequest,
    sample: int,
    question: Question,
    answer: Answer,
    fault: RewardFault,
    *,
    explorer: str,
    held_out: bool = False,
) -> RewardErrorReported:
    """Return the report of an error, with excerpts of prompt and response."""
    prompt = question.prompt
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)
    return RewardErrorReported(
        explorer=explorer,
        epoch=request.epoch,
        ordinal=request.ordinal,
        attempt=request.attempt,
        sample=sample,
        held_out=held_out,
        error_type=fault.error_type[:200] or "Error",
        place=fault.place[:500],
        message=_make_excerpt(fault.sentence, _LONGEST_PROMPT),
        # Its end: the innermost frames.
        traceback=fault.traceback[-LONGEST_TRACEBACK:],
        prompt=_make_excerpt(prompt, _LONGEST_PROMPT),
        response=_make_excerpt(answer.text, _LONGEST_RESPONSE),
    )


class ErrorReports:
    """Reports of one process to the log: the first error of each cause.

    Args:
        publish: Publishes an event; it is called in a thread.
    """

    def __init__(self, publish: Callable[[RewardErrorReported], None]) -> None:
        self._publish = publish
        self._causes: set[tuple[str, str]] = set()

    async def add(self, report: RewardErrorReported) -> None:
        """Report an error, if it is the first one of its cause. Never raises for the log's sake.

        The trainer gets the error in any case: with the request that it failed.
        """
        # Not the message: it often has a part of the answer, so that each error would be another.
        cause = report.error_type, report.place
        if cause in self._causes or len(self._causes) >= _REPORTED:
            return
        # Before the wait: answers are judged side by side, and would report the cause twice.
        self._causes.add(cause)
        try:
            await anyio.to_thread.run_sync(self._publish, report)
        except (TrinityError, ContractError) as error:
            logger.warning(
                "the error of a reward is not in the log (%s): %s", error, report.message
            )


def _make_excerpt(text: str, limit: int) -> str:
    """Return a text, or its beginning and its end, without single surrogates."""
    if len(text) > limit:
        gap = f" [... {len(text)} characters in all ...] "
        half = (limit - len(gap)) // 2
        text = text[:half] + gap + text[-half:]
    return text.encode("utf-8", "replace").decode()
