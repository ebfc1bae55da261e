"""Stacks of processes that do not answer, which py-spy reads from their memory (extra ``stacks``).

It works for a process that is stopped or never handles a signal again, and does not pause it. It
needs the right to trace the process: that of root, or of its user where the system allows it.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PY_SPY_PATIENCE = 2.0
"""Seconds in which py-spy reads the stacks of all processes that it is asked for, by default."""
SOURCE = "Read by py-spy from its memory, since the process wrote none itself:"
"""First line of the stacks."""
_MOST = 64 << 10
"""Bytes of output that are read of one process."""
_END = 1.0
"""Seconds in which a py-spy that is killed ends."""
_VERSION = "\nPython v"
"""Begin of the line after the command line of the process, which may hold a password."""


def read_stacks(pids: Iterable[int], patience: float = PY_SPY_PATIENCE) -> dict[int, str]:
    """Return the stacks of processes, with :data:`SOURCE` as their first line.

    Processes that py-spy may not read or cannot read in time are left out; all of them are where
    it is not installed.
    """
    program = find_program()
    if program is None:
        return {}
    end = time.monotonic() + patience
    with ExitStack() as running:
        started: dict[int, subprocess.Popen[bytes]] = {}
        # All are started before any is read, so that one deadline is enough for all.
        for pid in pids:
            with suppress(OSError):
                started[pid] = running.enter_context(_dump(program, pid))
        texts = {
            pid: _without_command_line(_read_output(process, end))
            for pid, process in started.items()
        }
    return {pid: f"{SOURCE}\n{text}" for pid, text in texts.items() if text}


def find_program() -> str | None:
    """Return the path of py-spy, on PATH or beside the interpreter; None if it is not there."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("py-spy") or shutil.which("py-spy", path=beside)


@contextmanager
def _dump(program: str, pid: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start py-spy for a process, and kill it on leaving, should it still run."""
    # Nonblocking: a pause would stop a process that others may wait for.
    command = [program, "dump", "--pid", str(pid), "--nonblocking", "--full-filenames"]
    nothing = subprocess.DEVNULL
    # The program is the installed py-spy, and its arguments are ours.
    started = subprocess.Popen(  # noqa: S603
        command, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing
    )
    try:
        yield started
    finally:
        # A py-spy that is late must not outlive its deadline.
        started.kill()
        with suppress(subprocess.TimeoutExpired):
            # Reaped, or it stays as a zombie of a process that lives for days.
            started.wait(_END)
        if started.stdout is not None:
            started.stdout.close()


def _read_output(process: subprocess.Popen[bytes], end: float) -> str:
    """Return the output of a process, cut to its bound; empty if it failed or was late."""
    assert process.stdout is not None
    descriptor, output, ready = process.stdout.fileno(), b"", select.poll()
    ready.register(descriptor, select.POLLIN)
    # Bounded by bytes and time: the output of a foreign process is not trusted.
    while len(output) < _MOST:
        if not ready.poll(1000 * max(0.0, end - time.monotonic())):
            return ""
        piece = os.read(descriptor, _MOST - len(output))
        if not piece:
            # The end of the output is not the end of the process, whose status decides.
            with suppress(subprocess.TimeoutExpired):
                if process.wait(max(0.0, end - time.monotonic())) == 0:
                    break
            return ""
        output += piece
    return output.decode(errors="replace")


def _without_command_line(output: str) -> str:
    # From the end: a command line may contain this text.
    _, version, rest = output.rpartition(_VERSION)
    return rest.partition("\n")[2].strip() if version else ""
