"""Pool of processes for one environment, which replaces those that die or hang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

import anyio
import msgspec

from trinity_events.diagnostics.waits import NO_REPORTS, WaitReporter
from trinity_events.errors import TrinityError
from trinity_schemas import FailedDependency

from ...tasks.base import Message, Question
from ..processes.frames import format_value
from ..processes.pool import (
    PIPE_CLOSED,
    START_DEADLINE,
    UserProcess,
    UserProcesses,
    killed_on_error,
)
from .messages import Raised, Ready, Replied, ReplyRequest, decoded, encoded

TOOL = "tool"
"""Role of a reply that is plain text."""


class EnvironmentFailed(TrinityError):
    """An environment died, hung, raised, or returned no reply.

    Attributes:
        name: Its name.
        fault: ``load`` if it raised as it was loaded, with ``slow load`` and ``ended load``;
            ``early`` if it replied before a question. Else what is wrong with a reply.
        reason: Error of the environment, end of its process, or place of its code.
        deadline: Seconds that were waited.
    """

    name: str
    fault: Literal[
        "reply", "slow", "ended", "garbled", "raised", "slow load", "ended load", "load", "early"
    ]
    reason: str = ""
    deadline: float = 0.0
    texts: ClassVar = {
        "reply": "environment {name} returned {reason}, neither text, nor messages with role and "
        "content, nor None",
        "slow": "environment {name} did not reply within {deadline:g} s{reason}",
        "ended": "environment {name} ended its process ({reason})",
        "garbled": "environment {name} garbled its reply ({reason})",
        "raised": "environment {name} failed: {reason}",
        "slow load": "environment {name} was not loaded within {deadline:g} s{reason}",
        "ended load": "environment {name} ended its process while it was loaded ({reason})",
        "load": "environment {name} cannot be loaded: {reason}",
        "early": "environment {name} replied before it was asked",
    }

    @property
    def dependency(self) -> FailedDependency:
        """Return the environment as what failed."""
        loading = ("load", "slow load", "ended load", "early")
        return FailedDependency(f"environment {self.name}", unreachable=self.fault in loading)


class EnvironmentProcesses:
    """Environment in processes of its own, which live as long as the `async with` block.

    A call takes a process that is free. After a call that failed its process is killed, with all
    that it started, and the next call starts another one. Nothing is unpickled.

    Args:
        name: Name of the environment; the processes load it.
        deadline: Seconds for one reply.
        count: Processes, and so replies at a time.
        folder: Directory that a relative name starts from.
        waits: Reporter of long waits for a reply; by default none reports them.
    """

    def __init__(
        self,
        name: str,
        *,
        deadline: float,
        count: int = 1,
        folder: Path | None = None,
        waits: WaitReporter = NO_REPORTS,
    ) -> None:
        self._waits = waits
        self.name = name
        self.deadline = deadline
        self._folder = folder or Path()
        self._processes = UserProcesses(count, self._started)

    async def __aenter__(self) -> Self:
        """Start one process. Raises EnvironmentFailed if the environment cannot be loaded."""
        async with self._processes.acquire():
            return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kill the processes; the calls must have ended."""
        await self._processes.aclose()

    async def reply(self, question: Question, messages: Sequence[Message]) -> list[Message] | None:
        """Return the environment's messages, or None at the end of the episode.

        Raises EnvironmentFailed if it gives neither.
        """
        value = await self._call(encoded(ReplyRequest(question, list(messages))))
        if value is None:
            return None
        if isinstance(value, str):
            return [{"role": TOOL, "content": value}]
        try:
            # One message or several: an environment may return either.
            replies = msgspec.convert(value if isinstance(value, list) else [value], list[Message])
        except msgspec.ValidationError:
            replies = []
        if not replies or any(
            "role" not in message or "content" not in message for message in replies
        ):
            raise EnvironmentFailed(self.name, "reply", format_value(value))
        return replies

    async def _call(self, request: bytes) -> Any:
        async with self._processes.acquire() as process:
            try:
                reply = await self._exchange(process, request)
            except TimeoutError:
                # Asked before the error leaves the pool's block, which kills the process.
                where = await process.place()
                raise EnvironmentFailed(self.name, "slow", where, self.deadline) from None
            except PIPE_CLOSED:
                raise EnvironmentFailed(self.name, "ended", await process.ending()) from None
            except (msgspec.MsgspecError, ValueError) as error:
                raise EnvironmentFailed(self.name, "garbled", str(error)) from None
            if isinstance(reply, Raised):
                raise EnvironmentFailed(self.name, "raised", reply.error)
        return reply.value if isinstance(reply, Replied) else None

    async def _exchange(self, process: UserProcess, request: bytes) -> Any:
        what = f"a reply of environment {self.name}"
        with (
            self._waits.waiting(what, [process.name], deadline=self.deadline),
            anyio.fail_after(self.deadline),
        ):
            await process.requests.send(request)
            return decoded(await process.receive())

    async def _started(self) -> UserProcess:
        process = await UserProcess.start(f"{__package__}.child", self.name, str(self._folder))
        async with killed_on_error(process):
            try:
                with anyio.fail_after(START_DEADLINE):
                    # Nothing is sent first: the child reports by itself that it is loaded.
                    reply = decoded(await process.receive())
            except TimeoutError:
                where = await process.place()
                raise EnvironmentFailed(self.name, "slow load", where, START_DEADLINE) from None
            except PIPE_CLOSED:
                ending = await process.ending()
                raise EnvironmentFailed(self.name, "ended load", ending) from None
            if isinstance(reply, Raised):
                raise EnvironmentFailed(self.name, "load", reply.error)
            # The user's code may have written to the pipe while it was imported.
            if not isinstance(reply, Ready):
                raise EnvironmentFailed(self.name, "early")
        return process
