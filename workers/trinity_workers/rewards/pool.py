"""Processes that judge answers, each replaced when it fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

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
from .base import collect_rewards
from .child import Judge, RewardSource, Verdict, encoded
from .errors import ProcessFault, RewardFailed, RewardFunctionFailed, RewardProcessFailed
from .values import Rewarded, RewardFault

# Not more by default: each process imports the user's libraries again.
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
                        verdict = await self._exchange(process, request, limit, "late")
                    # Sent once: one request has a verdict for each of its answers.
                    request = b""
                    index = verdict.index
                    # The process runs a user's code, which may send what was not asked for.
                    if not 0 <= index < len(answers) or index in judged or index in faults:
                        raise self._failed("unasked")
                    if verdict.rewarded is not None:
                        judged[index] = verdict.rewarded
                    else:
                        faults[index] = self._add_name(verdict.fault)
        except RewardFailed as error:
            if not faults and not judged:
                raise
            lost = {at: error.shared_fault for at in range(len(answers)) if at not in judged}
            # An answer's own error is nearer to the cause than the one that all others share.
            faults = lost | faults
        return collect_rewards(judged, faults)

    async def aclose(self) -> None:
        """End all processes."""
        await self._processes.aclose()

    async def _started(self) -> UserProcess:
        process = await UserProcess.start(str(__package__))
        async with killed_on_error(process):
            source = encoded(self._source)
            verdict = await self._exchange(process, source, START_DEADLINE, "loading")
            if verdict.fault is not None:
                raise RewardFunctionFailed(self._source.name, verdict.fault)
        return process

    async def _exchange(
        self, process: UserProcess, sent: bytes, seconds: float, late: Literal["late", "loading"]
    ) -> Verdict:
        """Send bytes, and return the next verdict."""
        try:
            with anyio.fail_after(seconds + _GRACE):
                if sent:
                    await process.requests.send(sent)
                return msgspec.json.decode(await process.receive(), type=Verdict)
        except TimeoutError:
            # Asked for its place now: the error that leaves the pool's block kills the process.
            raise self._failed(late, seconds, await process.place()) from None
        except PIPE_CLOSED:
            raise self._failed("ended", detail=await process.ending()) from None
        except ValueError:  # msgspec's error is one
            raise self._failed("undecodable") from None

    def _failed(
        self, fault: ProcessFault, seconds: float = 0.0, detail: str = ""
    ) -> RewardProcessFailed:
        """Return the error of a process, which all answers without a verdict have."""
        return RewardProcessFailed(self._source.name, fault, seconds, detail)

    def _add_name(self, fault: RewardFault | None) -> RewardFault:
        """Return an error with the name of the reward before its sentence."""
        fault = fault or RewardFault(sentence="sent no verdict", error_type="UnexpectedReply")
        return structs.replace(fault, sentence=f"the reward {self._source.name} {fault.sentence}")
