"""Rewards of a model that judges, behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence

import anyio
import msgspec
from msgspec import Struct

from trinity_events.error_text import ungrouped

from ..reward_settings import RewardsConfig
from ..tasks import Answer, Question
from .base import Rewarded
from .http_calls import HttpCalls, Unusable

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class _Message(Struct):
    content: str | None = None


class _Choice(Struct):
    message: _Message


class _Completion(Struct):
    choices: list[_Choice]


class JudgeRewards:
    """Judge by a model: each answer is one chat completion, and the last number is its grade.

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
        found: dict[int, Rewarded] = {}

        async def one(index: int, answer: Answer) -> None:
            found[index] = await self._http.post(
                f"{self._url}/chat/completions", self._request(question, answer), self._graded
            )

        with ungrouped():
            async with anyio.create_task_group() as tasks:
                for index, answer in enumerate(answers):
                    tasks.start_soon(one, index, answer)
        return [found[index] for index in range(len(answers))]

    def _request(self, question: Question, answer: Answer) -> dict[str, object]:
        prompt = "\n".join(f"{one['role']}: {one['content']}" for one in question.messages())
        if isinstance(question.prompt, str):
            prompt = question.prompt
        asked = self._settings.judge_prompt.format(
            prompt=prompt,
            reference="" if question.answer is None else question.answer,
            response=answer.text,
        )
        return {
            "model": self._settings.judge_model,
            "messages": [{"role": "user", "content": asked}],
            "temperature": 0,
        }

    def _graded(self, reply: bytes) -> Rewarded:
        """Return the reward of a reply. Raises Unusable: another reply may have a grade."""
        try:
            choices = msgspec.json.decode(reply, type=_Completion).choices
        except msgspec.DecodeError as error:
            raise Unusable(f"sent what is no chat completion: {error}") from None
        numbers = _NUMBER.findall((choices[0].message.content or "") if choices else "")
        if not numbers:
            raise Unusable("gave no grade")
        grade, best = float(numbers[-1]), self._settings.best_grade
        if not 0 <= grade <= best:
            raise Unusable(f"gave the grade {grade:g}, which is not from 0 to {best:g}")
        return Rewarded(reward=grade / best, parts={"grade": grade})

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()
