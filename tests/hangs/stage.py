"""Stage of one planted hang: a server and a run of its own, and the processes of the plant."""

from __future__ import annotations

import json
import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.faulty_proxy import Proxy
from tests.support.redis_servers import Server
from tests.support.waits import PATIENCE, wait_until

REPOSITORY = Path(__file__).parents[2]


class Part:
    """Process of a plant."""

    def __init__(
        self, name: str, command: Sequence[str], output: Path, env: dict[str, str]
    ) -> None:
        self.name = name
        self._output = output
        with output.open("w") as out:
            self._process = subprocess.Popen(
                command, cwd=REPOSITORY, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def says(self, word: str) -> Part:
        """Wait until it has said a word."""
        wait_until(
            lambda: word in self._output.read_text() or self._process.poll() is not None,
            f"{self.name} did not say {word!r}: {self._output.read_text()[-2000:]}",
        )
        assert word in self._output.read_text(), f"{self.name} ended: {self._output.read_text()}"
        return self

    def stop(self) -> None:
        """Stop it as SIGSTOP does."""
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def limit_files(self, nbytes: int) -> None:
        """Let it write no file beyond a size, as on a disk that is full."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (nbytes, nbytes))

    def end(self) -> None:
        with suppress(OSError):
            os.kill(self.pid, signal.SIGCONT)
        self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()


_OPEN = """
import sys
import anyio
from trinity_events.log import open_run
from trinity_events.server import connect

async def open_on_server(url, run, strategy):
    async with connect(url) as client:
        await open_run(client, run, save_strategy=strategy)

anyio.run(open_on_server, *sys.argv[1:])
"""
"""Program that opens a run."""


class Stage:
    """Place of one plant; everything on it ends with its block."""

    def __init__(self, name: str, folder: Path) -> None:
        self.run = f"hang-{name}-{secrets.token_hex(3)}"
        self.folder = folder
        self.root = folder / "root"
        self._exits = ExitStack()
        self._parts = 0

    @contextmanager
    def set(self, *options: str) -> Iterator[Stage]:
        """Start the server with options, and open the run."""
        with self._exits:
            self.server = self.new_server("log", *options)
            self.url = self.server.url
            self.client = self._exits.enter_context(self.server.client())
            yield self

    def open_on(self, url: str, strategy: str = "unrestricted") -> None:
        """Open the run on a server, by a process of the parts' host.

        A host's identity names the temporary folder, which is the stage's own. Dead parts that
        published nothing are taken to be on the host on which the run was opened.
        """
        command = [sys.executable, "-c", _OPEN, url, self.run, strategy]
        subprocess.run(command, cwd=REPOSITORY, env=self._env, timeout=PATIENCE, check=True)

    # --- parts -----------------------------------------------------------------------------------

    def new_server(self, name: str, *options: str) -> Server:
        server = Server(self.folder / name, *options)
        self._exits.callback(server.kill)
        # A write beyond the limit of a file's size is to be an error, and not the end.
        server.binary = self._ignoring_sigxfsz(server.binary)
        server.start()
        return server

    def _ignoring_sigxfsz(self, binary: Path) -> Path:
        script = self.folder / "server"
        script.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec {binary} \"$@\"\n")
        script.chmod(0o700)
        return script

    def start(self, role: str, rank: int, *words: str, url: str = "") -> Part:
        """Start an actor."""
        module = [sys.executable, "-m", "tests.hangs.actors", role, url or self.url, self.run]
        return self._part(role, [*module, str(rank), *words])

    def reducer(self, *options: str, url: str = "", leads: bool = True) -> Part:
        """Start a reducer, and wait until one leads."""
        part = self._part(
            "reducer",
            [
                *(sys.executable, "-m", "trinity_events", "reducer", "--run", self.run),
                *("--redis-url", url or self.url, "--checkpoint-root", str(self.root)),
                *("--lifeline", "--verbose", *options),
            ],
        )
        return part.says("leads run") if leads else part

    def proxy(self) -> Proxy:
        """Return a network to the server of its own, which can fail."""
        return self._exits.enter_context(Proxy(self.url))

    def script(self, text: str) -> str:
        """Write a user's module, and return its path."""
        path = self.folder / "mine.py"
        path.write_text(text)
        return str(path)

    def until(self, met: Callable[[], Any], otherwise: str) -> Any:
        return wait_until(met, otherwise, patience=PATIENCE)

    def callback(self, act: Callable[[], object]) -> None:
        """Call something at the end."""
        self._exits.callback(act)

    def _part(self, name: str, command: Sequence[str]) -> Part:
        self._parts += 1
        output = self.folder / f"{self._parts}-{name}.out"
        part = Part(name, command, output, self._env)
        self._exits.callback(part.end)
        return part

    @property
    def _env(self) -> dict[str, str]:
        home = str(self.folder)
        # Processes of other versions may sweep the names of ended ones in the shared folder.
        return {**os.environ, "TRINITY_HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1"}

    # --- the question ----------------------------------------------------------------------------

    def explain(self) -> dict[str, Any]:
        """Run the real command; an error is a document with its sentence."""
        result = subprocess.run(
            [
                *(sys.executable, "-m", "trinity_events", "explain", self.run, "--json"),
                *("--redis-url", self.url, "--checkpoint-root", str(self.root)),
            ],
            cwd=REPOSITORY,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if result.returncode:
            cause = {"reason": "error", "sentence": result.stderr.strip()}
            return {"causes": [cause]}
        document: dict[str, Any] = json.loads(result.stdout)
        return document
