"""Pool of processes that run a user's code, each killed and replaced when a call to it fails.

1. A process has one call at a time, and there are at most ``count`` processes.
2. Only a call without an error gives its process back. Any other one kills it, a cancelled one too.
3. A process is killed with all that it started in its session.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from subprocess import PIPE

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from ...runtime.process_exit import format_exit
from ...runtime.process_groups import kill_group
from .frames import LARGEST, LENGTH_BYTES
from .stacks import StackFile, format_place

START_DEADLINE = 120.0
"""Seconds for a process to start and load the user's code: imports may be slow."""
PIPE_CLOSED = (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, OSError)
"""Errors of a pipe whose process has closed it, most often by its end."""
_ENDING = 5.0
"""Seconds in which a process that has closed its pipes ends."""

logger = logging.getLogger(__name__)


class UserProcess:
    """One process, and the pipes to it."""

    def __init__(self, process: anyio.abc.Process, stacks: StackFile) -> None:
        self._stacks = stacks
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self.requests = process.stdin
        self._replies = BufferedByteReceiveStream(process.stdout)

    @classmethod
    async def start(cls, module: str, *arguments: str) -> UserProcess:
        """Start ``python -m module``, in a session of its own: Ctrl-C is for the run alone."""
        stacks = StackFile()
        try:
            process = await anyio.open_process(
                [sys.executable, "-m", module, *arguments],
                stdin=PIPE,
                stdout=PIPE,
                # The parent's: what the user's code prints is where the parent's log is.
                stderr=None,
                env=os.environ | stacks.environment,
                pass_fds=(stacks.descriptor,),
                start_new_session=True,
            )
        except BaseException:
            stacks.close()
            raise
        return cls(process, stacks)

    @property
    def name(self) -> str:
        """Name of the process in reports of waits."""
        return f"process {self._process.pid}"

    async def receive(self) -> bytes:
        """Return the payload of the next frame.

        Raises:
            ValueError: if it is larger than :data:`LARGEST`.
            One of PIPE_CLOSED: if the process has closed its pipe.
        """
        length = int.from_bytes(await self._replies.receive_exactly(LENGTH_BYTES), "big")
        # Code that writes to the pipe itself could announce up to 4 GiB.
        if length > LARGEST:
            raise ValueError(f"{length} bytes are more than {LARGEST}")
        return await self._replies.receive_exactly(length)

    async def ending(self) -> str:
        """Return in words how the process ended, whose pipes are closed."""
        with anyio.move_on_after(_ENDING):
            code = await self._process.wait()
            # In the form of wait(2): the signal in the low byte, or the code above it.
            return format_exit(-code if code < 0 else code << 8)
        return "it closed its pipe"

    async def place(self) -> str:
        """Log the stacks of a late process; return the place of the user's code.

        The place is the end of a sentence, and empty if it is unknown.
        """
        stacks = await self._stacks.request(self._process.pid)
        if stacks:
            logger.warning("%s is late; its stacks:\n%s", self.name, stacks.rstrip())
        return format_place(stacks)

    async def kill(self) -> None:
        """Kill the process, and all that it started."""
        self._stacks.close()
        await kill_group(self._process)


class UserProcesses:
    """Pool of processes for calls that each take a free one.

    Args:
        count: Maximum number of processes, and so of calls at a time.
        start: Starts a process, and returns it when it has loaded the user's code.
    """

    def __init__(self, count: int, start: Callable[[], Awaitable[UserProcess]]) -> None:
        self._free = anyio.Semaphore(count)
        self._start = start
        self.idle: list[UserProcess] = []

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[UserProcess]:
        """Take a process for the block; it is killed if the block raises."""
        async with self._free:
            process = self.idle.pop() if self.idle else await self._start()
            async with killed_on_error(process):
                yield process
            # Not after an error, which leaves a process in an unknown state and kills it.
            self.idle.append(process)

    async def aclose(self) -> None:
        """Kill the processes; the calls must have ended."""
        with anyio.CancelScope(shield=True):
            while self.idle:
                await self.idle.pop().kill()


@asynccontextmanager
async def killed_on_error(process: UserProcess) -> AsyncIterator[None]:
    """Kill the process if the block raises."""
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True):
            await process.kill()
        raise
