"""Stacks of a process that runs a user's code, which it writes when its parent asks for them."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import anyio

from trinity_events.diagnostics.stacks import read_answer

_ASKED = signal.SIGUSR1
_VARIABLE = "TRINITY_STACKS_FILE"
"""Environment variable with the descriptor of the file for stacks."""
_PATIENCE = 5.0
"""Seconds in which a process writes its stacks; one that is stopped writes none."""
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_OURS = str(Path(__file__).parents[2])
_STANDARD = sysconfig.get_path("stdlib")


class StackFrame(NamedTuple):
    """One call of a stack."""

    file: str
    line: int
    function: str


class StackFile:
    """File without a name, to which a process writes its stacks. Made by the parent."""

    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="trinity-stacks-")
        # Without a name it is freed with its last descriptor, however the processes end.
        Path(name).unlink()
        self._file = os.fdopen(descriptor, "rb")

    @property
    def descriptor(self) -> int:
        """Descriptor that the process inherits."""
        return self._file.fileno()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that tell the process of the descriptor."""
        return {_VARIABLE: str(self.descriptor)}

    async def request(self, pid: int) -> str:
        """Return the stacks of all threads of the process; empty if it writes none in time.

        A process that has not called :func:`enable_stack_dumps` is killed by the question.
        """
        # Stacks of an earlier request stay in the file.
        begin = self._size()
        try:
            os.kill(pid, _ASKED)
        except ProcessLookupError:
            return ""
        end = time.monotonic() + _PATIENCE
        # In a thread: the file is polled, as a signal brings no answer.
        return await anyio.to_thread.run_sync(read_answer, self.descriptor, begin, end)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _size(self) -> int:
        return os.fstat(self.descriptor).st_size


def enable_stack_dumps() -> None:
    """Let this process write its stacks to its parent's file, even if it never runs Python again.

    The handler is C code: it needs no lock of the interpreter.
    """
    # Taken out: a process that the user's code starts would write into the file as well.
    descriptor = os.environ.pop(_VARIABLE, "")
    if descriptor:
        os.set_inheritable(int(descriptor), False)
        faulthandler.register(_ASKED, file=int(descriptor), all_threads=True)


def format_place(stacks: str) -> str:
    """Return the place of the user's code in stacks, as the end of a sentence; empty if unknown."""
    frame = user_frame(stacks)
    if frame is None:
        return ""
    return f": it was in {frame.function} ({Path(frame.file).name}, line {frame.line})"


def user_frame(stacks: str) -> StackFrame | None:
    """Return the innermost frame of the user's code in the oldest thread, which comes last.

    Frames of the standard library count only where there are no others.
    """
    calls: list[StackFrame] = []
    for line in stacks.splitlines():
        match = _FRAME.match(line)
        if match:
            calls.append(StackFrame(match[1], int(match[2]), match[3]))
        elif line.endswith("(most recent call first):"):
            calls = []
    outermost = next(
        (at for at, frame in enumerate(calls) if frame.file.startswith(_OURS)), len(calls)
    )
    theirs = calls[:outermost]
    return next(
        (frame for frame in theirs if not _is_standard(frame.file)), theirs[0] if theirs else None
    )


def _is_standard(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_STANDARD) and "-packages" not in file)
