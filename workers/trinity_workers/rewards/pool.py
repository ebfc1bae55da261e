"""Processes that judge answers, each replaced when it fails."""

from __future__ import annotations

import os
from collections.abc import Sequence

import anyio
import msgspec

from trinity_events.diagnostics.waits import NO_REPORTS, WaitReporter

from ..sandbox.processes.pool import (
    PIPE_CLOSED,
    START_DEADLINE,
    UserProcess,
    UserProcesses,
    killed_on_error,
)
from ..tasks import Answer, Question, TaskError
from .base import Rewarded, RewardFailed
from .child import Judge, RewardSource, Verdict, encoded

_PROCESSES = 4
_GRACE = 1.0
"""Seconds beyond the function's deadline, for the way of its answer."""


class RewardPool:
    """Judge by a user's function, in processes that may hang or die.

    Args:
        source: Names of the function.
        processes: Maximum number of processes; by default one a core, at most four.
        waits: Reporter of long waits for a reward; by default none reports them.
    """

    def __init__(
        self,
        source: RewardSource,
        *,
        processes: int | None = None,
        waits: WaitReporter = NO_REPORTS,
    ) -> None:
        self._source = source
        self._waits = waits
        count = processes or max(1, min(_PROCESSES, os.cpu_count() or 1))
        self._processes = UserProcesses(count, self._started)

    async def start(self) -> None:
        """Start one process, so that a function that cannot be loaded is told at once."""
        async with self._processes.taken():
            pass

    async def judge(self, question: Question, answers: Sequence[Answer]) -> list[Rewarded]:
        """Return the reward of each answer.

        Raises:
            RewardFailed: in one sentence, if the function raised, hung, died, or returned no
                number. Its process is ended, and the next call has another one.
        """
        try:
            request = encoded(Judge(question=question, answers=list(answers)))
        except (TypeError, ValueError) as error:
            raise TaskError(f"a question of {self._source.task} holds no JSON: {error}") from None
        found: list[Rewarded | None] = [None] * len(answers)
        async with self._processes.taken() as process:
            for _ in answers:
                limit = self._source.deadline
                what = f"the reward {self._source.name}"
                with self._waits.waiting(what, [process.name], deadline=limit):
                    verdict = await self._exchange(process, request, limit, "did not return")
                request = b""
                if verdict.rewarded is None or not 0 <= verdict.index < len(found):
                    raise self._failed(verdict.fault or "gave an answer that was not asked for")
                found[verdict.index] = verdict.rewarded
        return [one for one in found if one is not None]

    async def aclose(self) -> None:
        """End all processes."""
        await self._processes.aclose()

    async def _started(self) -> UserProcess:
        process = await UserProcess.start(str(__package__))
        async with killed_on_error(process):
            source = encoded(self._source)
            verdict = await self._exchange(process, source, START_DEADLINE, "did not load")
            if verdict.fault is not None:
                raise RewardFailed(verdict.fault)
        return process

    async def _exchange(
        self, process: UserProcess, sent: bytes, seconds: float, missing: str
    ) -> Verdict:
        """Send bytes, and return the next verdict."""
        try:
            with anyio.fail_after(seconds + _GRACE):
                if sent:
                    await process.requests.send(sent)
                return msgspec.json.decode(await process.receive(), type=Verdict)
        except TimeoutError:
            where = await process.place()
            raise self._failed(f"{missing} within {seconds:g} s{where}") from None
        except PIPE_CLOSED:
            raise self._failed(f"ended its process ({await process.ending()})") from None
        except ValueError:  # msgspec's error is one
            raise self._failed("sent what is no answer") from None

    def _failed(self, told: str) -> RewardFailed:
        return RewardFailed(f"the reward {self._source.name} {told}")
