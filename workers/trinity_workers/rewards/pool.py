"""Processes that judge answers, each replaced when it fails."""

from __future__ import annotations

import os
from collections.abc import Sequence

import anyio
import msgspec
from msgspec import structs

from trinity_events.diagnostics.waits import NO_REPORTS, WaitReporter

from ..sandbox.processes.pool import (
    PIPE_CLOSED,
    START_DEADLINE,
    UserProcess,
    UserProcesses,
    killed_on_error,
)
from ..tasks import Answer, Question
from ..tasks.errors import QuestionUnencodable
from .base import Rewarded, RewardFailed, RewardFault, collect_rewards
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
        """Start one process, so that a function that cannot be loaded is reported at once."""
        async with self._processes.acquire():
            pass

    async def judge(self, question: Question, answers: Sequence[Answer]) -> list[Rewarded]:
        """Return the reward of each answer.

        Raises:
            RewardFailed: in one sentence about the first answer for which the function raised,
                hung, died, or returned no number. A process that hung or died is replaced, and all
                answers without a reward or an error by then have its error.
        """
        try:
            request = encoded(Judge(question=question, answers=list(answers)))
        except (TypeError, ValueError) as error:
            raise QuestionUnencodable(self._source.task, str(error)) from None
        judged: dict[int, Rewarded] = {}
        faults: dict[int, RewardFault] = {}
        limit, name = self._source.deadline, f"the reward {self._source.name}"
        try:
            async with self._processes.acquire() as process:
                for _ in answers:
                    with self._waits.waiting(name, [process.name], deadline=limit):
                        verdict = await self._exchange(process, request, limit, "did not return")
                    request = b""
                    index = verdict.index
                    if not 0 <= index < len(answers) or index in judged or index in faults:
                        raise self._failed(
                            "UnexpectedReply", "gave an answer that was not asked for"
                        )
                    if verdict.rewarded is not None:
                        judged[index] = verdict.rewarded
                    else:
                        faults[index] = self._add_name(verdict.fault)
        except RewardFailed as error:
            if not faults and not judged:
                raise
            lost = {at: error.fault for at in range(len(answers)) if at not in judged}
            faults = lost | faults
        return collect_rewards(judged, faults)

    async def aclose(self) -> None:
        """End all processes."""
        await self._processes.aclose()

    async def _started(self) -> UserProcess:
        process = await UserProcess.start(str(__package__))
        async with killed_on_error(process):
            source = encoded(self._source)
            verdict = await self._exchange(process, source, START_DEADLINE, "did not load")
            if verdict.fault is not None:
                fault = verdict.fault
                raise RewardFailed(fault.sentence, own_fault=fault)
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
            late = f"{missing} within {seconds:g} s{where}"
            raise self._failed("TimeoutError", late) from None
        except PIPE_CLOSED:
            ended = f"ended its process ({await process.ending()})"
            raise self._failed("ProcessEnded", ended) from None
        except ValueError:  # msgspec's error is one
            raise self._failed("UnexpectedReply", "sent what is no answer") from None

    def _failed(self, error_type: str, sentence: str) -> RewardFailed:
        """Return the error of a process, which all answers without a verdict have."""
        fault = self._add_name(RewardFault(sentence=sentence, error_type=error_type))
        return RewardFailed(fault.sentence, own_fault=fault)

    def _add_name(self, fault: RewardFault | None) -> RewardFault:
        """Return an error with the name of the reward before its sentence."""
        fault = fault or RewardFault(sentence="sent no verdict", error_type="UnexpectedReply")
        return structs.replace(fault, sentence=f"the reward {self._source.name} {fault.sentence}")
