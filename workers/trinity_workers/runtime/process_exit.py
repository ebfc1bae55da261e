"""Exit status of a process on this host, from the kernel, without being its parent."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import threading
from pathlib import Path

from trinity_events.system.host import get_host_id
from trinity_schemas import Process

VERDICT = 2.0
"""Seconds to wait for the exit status of a process that has ended."""
_PIDFD_GET_INFO = 0xC040FF0B
"""``_IOWR(0xFF, 11, struct pidfd_info)`` for its first 64 bytes, since Linux 6.13."""
_INFO_EXIT = 1 << 3
"""Flag that requests the exit status of a reaped process, since Linux 6.15."""
_EXIT_STATUS = 60
"""Offset of the exit status in ``struct pidfd_info``."""
_STATUS_AFTER_NAME = 49
"""Index of the exit status in ``/proc/PID/stat``, counted after the command's name."""
_HINTS: dict[int, str] = {
    signal.SIGKILL: " (by hand, or by the kernel for lack of memory: see dmesg)",
    signal.SIGSEGV: " (a crash in native code)",
    signal.SIGABRT: " (native code aborted)",
    signal.SIGBUS: " (a crash in native code, or shared memory that is full)",
}


class ExitWatch:
    """Watcher that records how processes of this host end.

    A process that is not a child is reaped by its parent within milliseconds, so a thread waits for
    each one. If the kernel does not report the end, it stays unknown.
    """

    def __init__(self) -> None:
        self._ends: dict[int, threading.Event] = {}
        self._statuses: dict[int, int] = {}

    def watch(self, process: Process) -> None:
        """Watch a process until it ends; ignore a process of another host."""
        if process.host_id != get_host_id() or not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            return
        ended = self._ends[process.pid] = threading.Event()
        # Daemons: a process must not outlive its work because those that it watches live.
        threading.Thread(
            target=self._wait, args=(process.pid, descriptor, ended), daemon=True
        ).start()

    def wait(self, process: Process, seconds: float = VERDICT) -> str:
        """Return how a process ended, such as ``killed by SIGKILL``; empty if it is not known."""
        ended = self._ends.get(process.pid)
        if ended is None or not ended.wait(seconds):
            return ""
        status = self._statuses.get(process.pid)
        return "" if status is None else format_exit(status)

    def _wait(self, pid: int, descriptor: int, ended: threading.Event) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        try:
            poll.poll()
            # The parent reaps within milliseconds. Until then /proc has the status; after that only
            # the pidfd has, on a kernel that is new enough.
            status = _status_of_zombie(pid)
            if status is None:
                status = _status_of_reaped(descriptor)
            if status is not None:
                self._statuses[pid] = status
        finally:
            os.close(descriptor)
            ended.set()


def format_exit(status: int) -> str:
    """Return an exit status of ``waitpid`` as text."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return f"killed by {name}{_HINTS.get(number, '')}"
    return f"it exited with status {os.WEXITSTATUS(status)}"


def format_process(role: str, process: Process | None) -> str:
    """Return a process as text, with its host and process id if they are known."""
    return role if process is None else f"{role} (process {process.pid} on {process.host})"


def _status_of_zombie(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name of a command may hold spaces and brackets, so fields are counted after its end.
    fields = stat.rpartition(")")[2].split()
    return int(fields[_STATUS_AFTER_NAME]) if fields[0] == "Z" else None


def _status_of_reaped(descriptor: int) -> int | None:
    info = bytearray(struct.pack("=Q", _INFO_EXIT).ljust(64, b"\0"))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", info)
    if not mask & _INFO_EXIT:
        return None
    (status,) = struct.unpack_from("=i", info, _EXIT_STATUS)
    return int(status)
