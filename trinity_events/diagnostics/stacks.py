"""Stacks of processes on this host, which those that wait for them take at a deadline.

A process of a run writes the stacks of its threads when it is sent SIGUSR1. The handler is C code:
it needs no lock of the interpreter, and answers in a process that never runs Python again. The
stacks of a process that is stopped are read by py-spy, where it is installed and may look.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from trinity_schemas import StacksTaken

from ..system.host import get_process_folder
from .py_spy import PY_SPY_PATIENCE, read_stacks

PATIENCE = 2.0
"""Seconds in which processes write their stacks, by default; one that is stopped writes none."""
MOST = 8
"""Maximum processes that are asked at a deadline."""
_LOOK = 0.02
"""Seconds between two looks at a file; one that did not grow meanwhile is complete."""
_LARGEST = 16_000
"""Maximum characters of the stacks of one process; those of its main thread are kept."""
_NAMED = 86_400.0
"""Seconds for which the name of a process that has ended stays."""
_SIGNAL = signal.SIGUSR1
_SUFFIX = ".stacks"

_own: Path | None = None
"""File of this process, once it writes its stacks when asked."""


def enable_stack_dumps(run_id: str, process: str) -> None:
    """Let this process write its stacks to a file in a folder of its user when it is asked.

    One process may have several names. Where there is no ``/proc`` or no room, it does nothing.

    Args:
        run_id: The run.
        process: Role and rank, as those that wait for it name it: ``explorer-3``.
    """
    with suppress(OSError):
        _own_file(get_process_folder())
        name_process(run_id, process)


def prepare_stack_dumps() -> None:
    """Let this process write its stacks when it is asked, under names that come later."""
    with suppress(OSError):
        _own_file(get_process_folder())


def name_process(run_id: str, process: str) -> None:
    """Give this process one more name, if it writes its stacks when it is asked."""
    if _own is None or _pid(_own) != os.getpid():
        return
    with suppress(OSError):
        name = get_process_folder() / f"{run_id}.{process}"
        link = name.with_name(f"{name.name}.{os.getpid()}")
        link.unlink(missing_ok=True)
        link.symlink_to(_own.name)
        # Renamed into place: a reader finds the old process or the new one, never none.
        link.replace(name)


def collect_stacks(
    run_id: str,
    processes: Iterable[str],
    *,
    patience: float = PATIENCE,
    py_spy_patience: float = PY_SPY_PATIENCE,
) -> list[StacksTaken]:
    """Take the stacks of processes of this user on this host; others are left out.

    It returns within ``patience`` seconds, and ``py_spy_patience`` more if a process wrote none.
    Such a process is stopped; its stacks are empty if py-spy cannot read them either.
    """
    with ExitStack() as files:
        requests = [
            request
            for name in list(processes)[:MOST]
            if (request := _request_stacks(run_id, name, files)) is not None
        ]
        # One deadline for all: they write at the same time.
        end = time.monotonic() + patience
        texts = {
            # The end, because faulthandler writes the main thread last.
            request.process: read_answer(request.descriptor, request.begin, end)[-_LARGEST:]
            for request in requests
        }
    silent = [
        request for request in requests if not texts[request.process] and _is_alive(request.path)
    ]
    pids = dict.fromkeys(request.pid for request in silent)
    read = read_stacks(pids, py_spy_patience) if pids else {}
    # The beginning, because py-spy lists the main thread first.
    texts |= {request.process: read.get(request.pid, "")[:_LARGEST] for request in silent}
    node = socket.gethostname()
    return [
        StacksTaken(
            process=request.process, node=node, pid=request.pid, stacks=texts[request.process]
        )
        for request in requests
    ]


class RunProcess(NamedTuple):
    """Process of a run on this host."""

    pid: int
    condition: Literal["running", "stopped", "ended"]


def host_processes(run_id: str) -> dict[str, RunProcess]:
    """Return the processes of this user on this host that have a name in a run.

    It only reads, and asks no process for anything.
    """
    processes: dict[str, RunProcess] = {}
    with suppress(OSError):
        folder = get_process_folder()
        for link in folder.glob(f"{run_id}.*"):
            name = link.name.removeprefix(f"{run_id}.")
            if "." in name or not link.is_symlink():
                continue
            with suppress(OSError, ValueError):
                target = folder / link.readlink().name
                processes[name] = RunProcess(_pid(target), _condition(target))
    return processes


def _condition(path: Path) -> Literal["running", "stopped", "ended"]:
    """Return the condition of the process of a file; a process that is traced is stopped too."""
    pid, _, began = path.name.removesuffix(_SUFFIX).partition(".")
    try:
        state, start_time = _state(int(pid))
    except OSError:
        return "ended"
    # Numbers of processes are used again; the start time tells them apart.
    if str(start_time) != began or state in "ZX":
        return "ended"
    return "stopped" if state in "Tt" else "running"


def read_answer(descriptor: int, begin: int, end: float) -> str:
    """Return what a process that was asked wrote after a position; empty if it wrote nothing.

    Args:
        descriptor: Open file that the process writes to.
        begin: Size of the file before it was asked.
        end: Time, by the monotonic clock, until which it is waited for.
    """
    size = begin
    while (size == begin or size != os.fstat(descriptor).st_size) and time.monotonic() < end:
        size = os.fstat(descriptor).st_size
        # Nothing announces that a signal handler has written.
        time.sleep(_LOOK)
    return os.pread(descriptor, 4 * _LARGEST, begin).decode(errors="replace")


class _StackRequest(NamedTuple):
    process: str
    path: Path
    pid: int
    descriptor: int
    begin: int


def _request_stacks(run_id: str, process: str, files: ExitStack) -> _StackRequest | None:
    """Ask a process for its stacks; return None if it is not on this host, or has ended."""
    try:
        path = get_process_folder() / (get_process_folder() / f"{run_id}.{process}").readlink().name
        # SIGUSR1 ends a process without a handler, so a number that is used again must not get it.
        if not _is_alive(path):
            return None
        # Opened before the signal: the process may end, and remove its file.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        files.callback(os.close, descriptor)
        pid, begin = _pid(path), os.fstat(descriptor).st_size
        os.kill(pid, _SIGNAL)
    except (OSError, ValueError):  # the name may be any text, also one that is no name of a file
        return None
    return _StackRequest(process, path, pid, descriptor, begin)


def _own_file(folder: Path) -> Path:
    """Return the file of this process; the first call makes it."""
    global _own  # noqa: PLW0603 - a signal has one handler in a process
    # A forked process inherits the module, and needs a file of its own.
    if _own is None or _pid(_own) != os.getpid():
        _sweep(folder)
        path = folder / f"{os.getpid()}.{_began(os.getpid())}{_SUFFIX}"
        # Appended, so that a second request does not overwrite the first answer.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # The descriptor stays open for ever: the handler writes to its number.
        faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)
        atexit.register(path.unlink, missing_ok=True)
        _own = path
    return _own


def _sweep(folder: Path) -> None:
    """Remove the files of processes that have ended, and their names a day later.

    Until then :func:`host_processes` tells that they have ended.
    """
    for path in folder.iterdir():
        with suppress(OSError):
            is_name = path.is_symlink()
            target = folder / path.readlink().name if is_name else path
            old = not is_name or time.time() - path.lstat().st_mtime > _NAMED
            if target.suffix == _SUFFIX and old and not _is_alive(target):
                path.unlink()


def _pid(path: Path) -> int:
    return int(path.name.partition(".")[0])


def _is_alive(path: Path) -> bool:
    """Return True if the process of a file runs, and is no later one of its number."""
    try:
        return path.exists() and str(_began(_pid(path))) == path.name.split(".")[1]
    except OSError:
        return False


def _began(pid: int) -> int:
    """Return the time at which a process began, in clock ticks since boot."""
    return _state(pid)[1]


def _state(pid: int) -> tuple[str, int]:
    """Return the letter of a process's state, and the clock ticks from boot to its begin."""
    # proc_pid_stat(5): the name before the last parenthesis may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # State and start time: fields 3 and 22 of the whole line.
    return fields[0], int(fields[19])
