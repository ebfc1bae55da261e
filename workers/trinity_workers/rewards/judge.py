"""Rewards of a model that judges, behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
from msgspec import Struct

from trinity_schemas.rollouts import LONGEST_JUDGE_REPLY

from ..sandbox.processes.frames import format_value
from ..tasks import Answer, Message, Question
from .base import collect_rewards
from .errors import PromptNotReadable, RewardFailed
from .grades import UnclearGrade, parse_grade
from .http_calls import UNDECODABLE, HttpCalls, Unusable
from .settings import RewardsConfig
from .values import Rewarded, RewardFault

_CUT = " ... "
"""Mark of what is left out of a long reply."""


class _Reply(Struct):
    content: Any = None


class _Choice(Struct):
    message: _Reply
    finish_reason: str | None = None


class _Completion(Struct):
    choices: list[_Choice]


class JudgeRewards:
    """Judge by a model: each answer is one chat completion, whose reply has its grade.

    Args:
        url: Base URL of the endpoint.
        settings: Model, prompt and best grade.
        http: Client for it.
    """

    def __init__(self, url: str, settings: RewardsConfig, http: HttpCalls) -> None:
        self._url = url.rstrip("/")
        self._settings = settings
        self._http = http

    async def start(self) -> None:
        """Raise RewardFailed unless the endpoint answers."""
        await self._http.reach(f"{self._url}/models", "rewards.judge")

    async def judge(self, question: Question, answers: Sequence[Answer]) -> list[Rewarded]:
        """Return the reward of each answer, from 0 to 1. Raises RewardFailed."""
        url = f"{self._url}/chat/completions"
        graded: dict[int, Rewarded] = {}
        faults: dict[int, RewardFault] = {}

        async def grade(index: int, answer: Answer) -> None:
            try:
                request = self._request(question, answer)
                graded[index] = await self._http.post(url, request, self._graded)
            except RewardFailed as error:
                faults[index] = error.shared_fault

        async with anyio.create_task_group() as tasks:
            for index, answer in enumerate(answers):
                tasks.start_soon(grade, index, answer)
        return collect_rewards(graded, faults)

    def _request(self, question: Question, answer: Answer) -> dict[str, object]:
        """Return the body of the call. Raises PromptNotReadable for a prompt that is no text."""
        if isinstance(question.prompt, str):
            prompt = question.prompt
        else:
            prompt = "\n".join(map(_format_message, question.prompt))
        content = self._settings.judge_prompt.format(
            prompt=prompt,
            reference="" if question.answer is None else str(question.answer),
            response=answer.text,
        )
        return {
            "model": self._settings.judge_model,
            "messages": [{"role": "user", "content": content}],
            # The most likely reply, so that equal answers get equal grades as far as the server
            # can.
            "temperature": 0,
        }

    def _graded(self, reply: bytes) -> Rewarded:
        """Return the reward of a reply. Raises Unusable: another reply may have a grade."""
        try:
            choices = msgspec.json.decode(reply, type=_Completion).choices
        except UNDECODABLE as error:
            raise Unusable("format", str(error)) from None
        best = self._settings.best_grade
        try:
            if not choices:
                raise UnclearGrade("none")
            if choices[0].finish_reason == "length":  # the end of "Grade: 10" may be missing
                raise UnclearGrade("cut off")
            text = _join_text(choices[0].message.content)
            share = parse_grade(text, best)
        except (UnclearGrade, ValueError) as error:
            raise Unusable("unclear", str(error)) from None
        return Rewarded(
            reward=share, parts={"grade": share * best}, judge_reply=_without_middle(text)
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def _format_message(message: Message) -> str:
    """Return a message of a prompt as text: its role, its content, and its tool calls.

    Raises PromptNotReadable for a message without a role, or with content that is no text.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise PromptNotReadable("role", value=format_value(message))
    try:
        text = _join_text(message.get("content"))
    except ValueError as error:
        raise PromptNotReadable("content", role, str(error)) from None
    if not message.get("tool_calls"):
        return f"{role}: {text}"
    try:
        calls = msgspec.json.encode(message["tool_calls"]).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptNotReadable("calls", role, str(error)) from None
    return f"{role}: {text}{' ' if text else ''}calls {calls}"


def _without_middle(text: str) -> str:
    """Return a reply whose reasons and grade, at its two ends, fit the contract."""
    if len(text) <= LONGEST_JUDGE_REPLY:
        return text
    half = LONGEST_JUDGE_REPLY // 2 - len(_CUT)
    return f"{text[:half]}{_CUT}{text[-half:]}"


def _join_text(content: object) -> str:
    """Return the content of a message as text, its parts in order.

    Raises ValueError, with the end of a sentence, for a part that is no text, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"has content that is neither text nor parts: {format_value(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else None
            raise ValueError(f"has a part that is no text: {kind or format_value(part)}")
        texts.append(text)
    return "".join(texts)
