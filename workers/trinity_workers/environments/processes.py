"""Pool of processes for one environment, which replaces those that die or hang."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from trinity_events.errors import TrinityError

from ..process_exit import in_words
from ..tasks.base import Message, Question, TaskError
from .messages import LARGEST, LENGTH_BYTES, Asked, Raised, Ready, Replied, Reply, framed

START_DEADLINE = 120.0
"""Seconds for a process to start and load the environment: imports may be slow."""
TOOL = "tool"
"""Role of a reply that is plain text."""
_LONGEST_SHOWN = 80
"""Characters of a value that an error shows."""
_ENDED = (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, OSError)


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
    """

    def __init__(
        self, name: str, *, deadline: float, count: int = 1, folder: Path | None = None
    ) -> None:
        self.name = name
        self.deadline = deadline
        self._folder = folder or Path()
        self._room = anyio.Semaphore(count)
        self._idle: list[_Child] = []

    async def __aenter__(self) -> Self:
        """Start one process. Raises TaskError if the environment cannot be loaded."""
        try:
            self._idle.append(await self._started())
        except EnvironmentFailed as error:
            raise TaskError(str(error)) from None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kill the processes; the calls must have ended."""
        with anyio.CancelScope(shield=True):
            while self._idle:
                await self._idle.pop().kill()

    async def reply(self, question: Question, messages: Sequence[Message]) -> list[Message] | None:
        """Return the environment's messages, or None at the end of the episode.

        Raises EnvironmentFailed if it gives neither.
        """
        value = await self._call(framed(Asked(question, list(messages))))
        if value is None:
            return None
        if isinstance(value, str):
            return [{"role": TOOL, "content": value}]
        try:
            found = msgspec.convert(value if isinstance(value, list) else [value], list[Message])
        except msgspec.ValidationError:
            found = []
        if not found or any("role" not in one or "content" not in one for one in found):
            raise self._failed(
                f"returned {_shown(value)}, neither text, nor messages with role and content, "
                "nor None"
            )
        return found

    async def _call(self, request: bytes) -> Any:
        async with self._child() as child:
            try:
                with anyio.fail_after(self.deadline):
                    reply = await child.ask(request)
            except TimeoutError:
                raise self._failed(f"did not reply within {self.deadline:g} s") from None
            except _ENDED:
                raise self._failed(f"ended its process ({await child.ending()})") from None
            except (msgspec.MsgspecError, ValueError) as error:
                raise self._failed(f"garbled its reply ({error})") from None
            if isinstance(reply, Raised):
                raise self._failed(f"failed: {reply.error}")
        return reply.value if isinstance(reply, Replied) else None

    def _failed(self, what: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"environment {self.name} {what}")

    @asynccontextmanager
    async def _child(self) -> AsyncIterator[_Child]:
        """Hold a free process for the block; it is killed if the block raises."""
        async with self._room:
            child = self._idle.pop() if self._idle else await self._started()
            try:
                yield child
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await child.kill()
                raise
            self._idle.append(child)

    async def _started(self) -> _Child:
        child = await _Child.start(self.name, self._folder)
        try:
            with anyio.fail_after(START_DEADLINE):
                reply = await child.receive()
            if isinstance(reply, Raised):
                raise self._failed(f"cannot be loaded: {reply.error}")
            if not isinstance(reply, Ready):
                raise self._failed("replied before it was asked")
        except BaseException as error:
            ended = isinstance(error, _ENDED) and await child.ending()
            with anyio.CancelScope(shield=True):
                await child.kill()
            if isinstance(error, TimeoutError):
                raise self._failed(f"was not loaded within {START_DEADLINE:g} s") from None
            if ended:
                raise self._failed(f"ended its process while it was loaded ({ended})") from None
            raise
        return child


class _Child:
    """One process, and the pipes to it."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._replies = BufferedByteReceiveStream(process.stdout)

    @classmethod
    async def start(cls, name: str, folder: Path) -> _Child:
        """Start a process, in a session of its own: Ctrl-C is for the explorer alone."""
        process = await anyio.open_process(
            [sys.executable, "-m", f"{__package__}.child", name, str(folder)],
            stdin=PIPE,
            stdout=PIPE,
            stderr=None,
            start_new_session=True,
        )
        return cls(process)

    async def ask(self, request: bytes) -> Reply:
        """Send a request, and return its reply."""
        await self._requests.send(request)
        return await self.receive()

    async def receive(self) -> Reply:
        """Return the next reply."""
        length = int.from_bytes(await self._replies.receive_exactly(LENGTH_BYTES), "big")
        if length > LARGEST:
            raise ValueError(f"{length} bytes are more than {LARGEST}")
        payload = await self._replies.receive_exactly(length)
        reply: Reply = msgspec.msgpack.decode(payload, type=Reply)
        return reply

    async def ending(self) -> str:
        """Return how the process ended, whose pipes are closed."""
        with anyio.move_on_after(5):
            code = await self._process.wait()
            return in_words(-code if code < 0 else code << 8)
        return "it closed its pipe"

    async def kill(self) -> None:
        """Kill the process, and what it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.aclose()


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
