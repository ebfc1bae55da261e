"""Processes that judge answers, each replaced when it fails."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from subprocess import PIPE

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from ..process_exit import in_words
from ..tasks import Answer, Question, TaskError
from .base import Rewarded, RewardFailed
from .child import LENGTH_BYTES, Judge, RewardSource, Verdict, frame

START_DEADLINE = 120.0
"""Seconds in which a process must import the reward function."""
_PROCESSES = 4
_GRACE = 1.0
"""Seconds beyond the function's deadline, for the way of its answer."""


class RewardPool:
    """Judge by a user's function, in processes that may hang or die.

    Args:
        source: Names of the function.
        processes: Maximum number of processes; by default one a core, at most four.
    """

    def __init__(self, source: RewardSource, *, processes: int | None = None) -> None:
        self._source = source
        count = processes or max(1, min(_PROCESSES, os.cpu_count() or 1))
        self._room = anyio.Semaphore(count)
        self._idle: list[_Child] = []

    async def start(self) -> None:
        """Start one process, so that a function that cannot be loaded is told at once."""
        async with self._child():
            pass

    async def judge(self, question: Question, answers: Sequence[Answer]) -> list[Rewarded]:
        """Return the reward of each answer.

        Raises:
            RewardFailed: in one sentence, if the function raised, hung, died, or returned no
                number. Its process is ended, and the next call has another one.
        """
        async with self._child() as child:
            return await child.judge(question, answers)
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        """End all processes."""
        while self._idle:
            await self._idle.pop().end()

    @asynccontextmanager
    async def _child(self) -> AsyncIterator[_Child]:
        async with self._room:
            child = self._idle.pop() if self._idle else _Child(self._source)
            try:
                await child.ready()
                yield child
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await child.end()
                raise
            self._idle.append(child)


class _Child:
    """One process with the function, started on first use."""

    def __init__(self, source: RewardSource) -> None:
        self._source = source
        self._process: Process | None = None

    async def ready(self) -> None:
        """Start the process, and wait until the function is loaded."""
        if self._process is not None:
            return
        # A session of its own: Ctrl-C is for the run, and what the function starts ends with it.
        self._process = await anyio.open_process(
            [sys.executable, "-m", str(__package__)],
            stdin=PIPE,
            stdout=PIPE,
            stderr=None,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._answers = BufferedByteReceiveStream(self._process.stdout)
        verdict = await self._exchange(frame(self._source), START_DEADLINE, "did not load")
        if verdict.fault is not None:
            raise RewardFailed(verdict.fault)

    async def judge(self, question: Question, answers: Sequence[Answer]) -> list[Rewarded]:
        found: list[Rewarded | None] = [None] * len(answers)
        limit = self._source.deadline
        try:
            request = frame(Judge(question=question, answers=list(answers)))
        except (TypeError, ValueError) as error:
            raise TaskError(f"a question of {self._source.task} holds no JSON: {error}") from None
        for _ in answers:
            verdict = await self._exchange(request, limit, "did not return")
            request = b""
            if verdict.rewarded is None or not 0 <= verdict.index < len(found):
                raise self._failed(verdict.fault or "gave an answer that was not asked for")
            found[verdict.index] = verdict.rewarded
        return [one for one in found if one is not None]

    async def _exchange(self, sent: bytes, seconds: float, missing: str) -> Verdict:
        """Send bytes, and return the next verdict."""
        assert self._process is not None and self._process.stdin is not None
        try:
            with anyio.fail_after(seconds + _GRACE):
                if sent:
                    await self._process.stdin.send(sent)
                head = await self._answers.receive_exactly(LENGTH_BYTES)
                payload = await self._answers.receive_exactly(int.from_bytes(head, "big"))
        except TimeoutError:
            raise self._failed(f"{missing} within {seconds:g} s") from None
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            raise self._failed(f"ended its process ({await self._ending()})") from None
        try:
            return msgspec.json.decode(payload, type=Verdict)
        except msgspec.DecodeError:
            raise self._failed("sent what is no answer") from None

    async def _ending(self) -> str:
        assert self._process is not None
        with anyio.move_on_after(_GRACE):
            code = await self._process.wait()
            return in_words(-code if code < 0 else code << 8)
        return "it closed its output"

    def _failed(self, told: str) -> RewardFailed:
        return RewardFailed(f"the reward {self._source.name} {told}")

    async def end(self) -> None:
        """Kill the process and all that it started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.aclose()
        self._process = None
