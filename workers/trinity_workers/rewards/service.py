"""Rewards of a service over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ..sandbox.processes.frames import format_value
from ..tasks import Answer, Question
from .base import collect_rewards
from .errors import RewardReplyRefused
from .http_calls import UNDECODABLE, HttpCalls
from .values import NO_REWARD, Rewarded, RewardFault, rewarded


class _RewardRequest(Struct, frozen=True, kw_only=True):
    question: Question
    answers: list[Answer]


class ServiceRewards:
    """Judge by a service, which gets all answers to a question in one call.

    It is posted ``{"question": {...}, "answers": [...]}`` and answers ``{"rewards": [...]}``: one
    number for each answer, or one object with ``reward`` and other numbers.

    Args:
        url: URL of the service.
        http: Client for it.
    """

    def __init__(self, url: str, http: HttpCalls) -> None:
        self._url = url
        self._http = http

    async def start(self) -> None:
        """Raise RewardFailed unless the service answers."""
        await self._http.reach(self._url, "rewards.service")

    async def judge(self, question: Question, answers: Sequence[Answer]) -> list[Rewarded]:
        """Return the reward of each answer. Raises RewardFailed."""

        def read(reply: bytes) -> list[Rewarded]:
            judged: dict[int, Rewarded] = {}
            faults: dict[int, RewardFault] = {}
            for index, value in enumerate(self._values(reply, len(answers))):
                try:
                    judged[index] = rewarded(value)
                except ValueError as error:
                    sentence = f"{self._http.name} {error}"
                    faults[index] = RewardFault(sentence=sentence, error_type=NO_REWARD)
            return collect_rewards(judged, faults)

        request = _RewardRequest(question=question, answers=list(answers))
        return await self._http.post(self._url, request, read)

    def _values(self, reply: bytes, count: int) -> list[Any]:
        try:
            decoded = msgspec.json.decode(reply)
        except UNDECODABLE as error:
            raise RewardReplyRefused(self._http.name, "JSON", str(error)) from None
        values = decoded.get("rewards") if isinstance(decoded, dict) else None
        if not isinstance(values, list):
            raise RewardReplyRefused(self._http.name, "list", format_value(decoded))
        # By their places alone rewards belong to answers: with another number none can be used.
        if len(values) != count:
            raise RewardReplyRefused(self._http.name, "count", rewards=len(values), answers=count)
        return values

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()
