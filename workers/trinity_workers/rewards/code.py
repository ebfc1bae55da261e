"""Rewards of code: an answer's program and its tests, run with limits."""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE

import anyio
import anyio.abc
import msgspec
from msgspec import Struct

from trinity_events.diagnostics.waits import NO_REPORTS, WaitReporter

from ..runtime.process_groups import kill_group
from ..tasks import Answer, Question
from ..tasks.fields import propose_field, read_field
from .code_blocks import find_code
from .errors import CodeNotRunnable
from .values import Rewarded

_RUNNER = Path(__file__).with_name("code_runner.py")
# 128 bits, which the code cannot guess (decision 29).
_TOKEN_BYTES = 16


class CodeLimits(Struct, frozen=True, kw_only=True):
    """Limits of one process of an answer's code."""

    seconds: float
    memory_bytes: int
    file_bytes: int
    files: int


class CodeRewards:
    """Judge by running an answer's Python code and then the question's tests, each time anew.

    The code is the last block of Python of the answer, after earlier blocks that define names which
    it or the tests lack. The reward is 1 if both run to their end, else 0: code that hangs, dies or
    floods is a wrong answer, not a failed attempt. The process has no environment, an empty folder
    of its own, and limits. It is no sandbox: it may use the network, and read what the explorer's
    user may read.

    Args:
        field: Field of a question's record with the tests, or the path to it.
        limits: Limits of each process.
        processes: Maximum number of processes.
        waits: Reporter of long waits.
    """

    def __init__(
        self,
        field: str,
        limits: CodeLimits,
        *,
        processes: int,
        waits: WaitReporter = NO_REPORTS,
    ) -> None:
        self._field = field
        self._limits = limits
        self._free = anyio.CapacityLimiter(processes)
        self._waits = waits

    async def start(self) -> None:
        """Raise CodeNotRunnable unless code runs here within the limits."""
        try:
            runs = await self._passes(["total = 1 + 1"], "assert total == 2")
        except OSError as error:
            raise CodeNotRunnable("start", reason=str(error)) from None
        if not runs:
            raise CodeNotRunnable("limits")

    async def judge(self, question: Question, answers: Sequence[Answer]) -> list[Rewarded]:
        """Return the reward of each answer.

        Raises CodeNotRunnable: the question has no tests, or no process can be started.
        """
        tests = read_field(question.data, self._field)
        if not isinstance(tests, str):
            raise CodeNotRunnable("tests", self._field, propose_field(question.data, self._field))
        rewards = dict.fromkeys(range(len(answers)), 0.0)
        faults: list[OSError] = []

        async def run(index: int, answer: Answer) -> None:
            try:
                rewards[index] = float(await self._passes(find_code(answer.text), tests))
            # Of this host: no process, or no folder for it. The code itself ends without one.
            except OSError as error:
                faults.append(error)

        async with anyio.create_task_group() as tasks:
            for index, answer in enumerate(answers):
                tasks.start_soon(run, index, answer)
        if faults:
            raise CodeNotRunnable("start", reason=str(faults[0]))
        return [Rewarded(reward=rewards[index]) for index in range(len(answers))]

    async def aclose(self) -> None:
        """Do nothing: each process ends with its answer."""

    async def _passes(self, blocks: list[str], tests: str) -> bool:
        """Return True if a program and its tests run to their end within the limits."""
        program = msgspec.json.encode({"blocks": blocks, "tests": tests})
        token = secrets.token_hex(_TOKEN_BYTES).encode()
        seconds = self._limits.seconds
        async with self._free:
            with (
                tempfile.TemporaryDirectory(
                    prefix="trinity-code-", ignore_cleanup_errors=True
                ) as folder,
                self._waits.waiting("an answer's code", deadline=seconds),
            ):
                process = await anyio.open_process(
                    # Isolated and without site-packages: neither the explorer's packages nor its
                    # folder.
                    [sys.executable, "-I", "-S", str(_RUNNER)],
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=DEVNULL,
                    cwd=folder,
                    env={"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
                    # A group of its own: it is killed with all that the code has started.
                    start_new_session=True,
                )
                try:
                    with anyio.move_on_after(seconds):
                        return await self._exchange(process, token, program) == token
                    return False
                finally:
                    with anyio.CancelScope(shield=True):
                        await kill_group(process)

    async def _exchange(self, process: anyio.abc.Process, token: bytes, program: bytes) -> bytes:
        """Send limits, token and program; return what comes back, no longer than the token."""
        assert process.stdin is not None and process.stdout is not None
        limits = msgspec.json.encode(self._limits)
        received = b""
        # Code that ends early has closed its pipes: a wrong answer, and no error.
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream, OSError):
            await process.stdin.send(limits + b"\n" + token + b"\n" + program)
            await process.stdin.aclose()
            # Up to one byte more than the token, so that a longer reply is no match.
            while len(received) <= len(token):
                received += await process.stdout.receive(len(token) + 1 - len(received))
        return received
