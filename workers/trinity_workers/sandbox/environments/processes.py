"""Pool of processes for one environment, which replaces those that die or hang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec

from trinity_events.diagnostics.waits import NO_REPORTS, WaitReporter
from trinity_events.errors import TrinityError

from ...tasks.base import Message, Question, TaskError
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
    """Raised if an environment died, hung, raised, or returned no reply."""


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
        """Start one process. Raises TaskError if the environment cannot be loaded."""
        try:
            async with self._processes.acquire():
                return self
        except EnvironmentFailed as error:
            raise TaskError(str(error)) from None

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
            replies = msgspec.convert(value if isinstance(value, list) else [value], list[Message])
        except msgspec.ValidationError:
            replies = []
        if not replies or any(
            "role" not in message or "content" not in message for message in replies
        ):
            raise self._failed(
                f"returned {format_value(value)}, neither text, nor messages with role and "
                "content, nor None"
            )
        return replies

    async def _call(self, request: bytes) -> Any:
        async with self._processes.acquire() as process:
            try:
                reply = await self._exchange(process, request)
            except TimeoutError:
                where = await process.place()
                raise self._failed(f"did not reply within {self.deadline:g} s{where}") from None
            except PIPE_CLOSED:
                raise self._failed(f"ended its process ({await process.ending()})") from None
            except (msgspec.MsgspecError, ValueError) as error:
                raise self._failed(f"garbled its reply ({error})") from None
            if isinstance(reply, Raised):
                raise self._failed(f"failed: {reply.error}")
        return reply.value if isinstance(reply, Replied) else None

    async def _exchange(self, process: UserProcess, request: bytes) -> Any:
        what = f"a reply of environment {self.name}"
        with (
            self._waits.waiting(what, [process.name], deadline=self.deadline),
            anyio.fail_after(self.deadline),
        ):
            await process.requests.send(request)
            return decoded(await process.receive())

    def _failed(self, what: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"environment {self.name} {what}")

    async def _started(self) -> UserProcess:
        process = await UserProcess.start(f"{__package__}.child", self.name, str(self._folder))
        async with killed_on_error(process):
            try:
                with anyio.fail_after(START_DEADLINE):
                    reply = decoded(await process.receive())
            except TimeoutError:
                where = await process.place()
                raise self._failed(f"was not loaded within {START_DEADLINE:g} s{where}") from None
            except PIPE_CLOSED:
                ending = await process.ending()
                raise self._failed(f"ended its process while it was loaded ({ending})") from None
            if isinstance(reply, Raised):
                raise self._failed(f"cannot be loaded: {reply.error}")
            if not isinstance(reply, Ready):
                raise self._failed("replied before it was asked")
        return process
