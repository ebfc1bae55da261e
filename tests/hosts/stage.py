"""Run whose parts are on hosts of their own: server and reducer on ``d``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio

from tests.support.waits import wait_until
from trinity_events.core import MonitorState
from trinity_events.log import RedisEventLog
from trinity_events.replay import current_state
from trinity_events.server import connect, find_binary

from .network import SHARED, HostNetwork, HostProcess

RUN = "apart"
HARNESS = ("a", "b", "c", "d")
"""Hosts of the trainer, of two explorers, and of server and reducer."""
_CHECKPOINTS = SHARED / "checkpoints"


class HostStage:
    """Hosts with a server and a reducer, and the state of their run, for the block.

    The harness is on no host: it reads the state by a socket in the shared folder, so that no fault
    holds it up.

    Args:
        clocks: Seconds by which the clock of a host is ahead.
    """

    def __init__(self, clocks: Mapping[str, float] | None = None) -> None:
        self.network = HostNetwork(HARNESS, clocks)
        self.redis_url = f"redis://{self.network['d'].address}:6379"
        self._socket = self.network.shared / "server.sock"
        self._exits = ExitStack()

    def __enter__(self) -> HostStage:
        self._exits.enter_context(self.network)
        try:
            server = self.network["d"]
            server.start(
                *(str(find_binary()), "--bind", "0.0.0.0", "--protected-mode", "no"),
                *("--unixsocket", str(SHARED / self._socket.name)),
                *("--appendonly", "yes", "--dir", "/tmp"),
                log=self.log("server"),
            )
            wait_until(self._socket.exists)
            self.start("d", "reducer")
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exits.close()

    def log(self, name: str) -> Path:
        """Return the file of the messages of a process."""
        return self.network.folder / f"{name}.log"

    def start(self, host: str, command: str, *args: str) -> HostProcess:
        """Start a command of trinity-events on a host."""
        return self.network[host].start(
            *(sys.executable, "-m", "trinity_events", command, "--run", RUN),
            *("--redis-url", self.redis_url, "--checkpoint-root", str(_CHECKPOINTS), *args),
            log=self.log(f"{command}-{host}"),
            env={"TRINITY_WEIGHTS_REDIS_URL": self.redis_url},
        )

    def start_member(self, host: str, role: str, lease: float) -> HostProcess:
        """Start a process that only runs under a lease; see :mod:`tests.hosts.member`."""
        return self.network[host].start(
            *(sys.executable, "-m", "tests.hosts.member", role, self.redis_url, RUN, str(lease)),
            log=self.log(f"{role}-{host}"),
        )

    def explain(self, host: str) -> dict[str, Any]:
        """Return what ``explain --json`` says on a host."""
        answer = self.network.folder / f"explain-{host}.json"
        answer.unlink(missing_ok=True)
        self.network[host].run(
            *(sys.executable, "-m", "trinity_events", "explain", RUN, "--json"),
            *("--redis-url", self.redis_url),
            log=answer,
        )
        explained: dict[str, Any] = json.loads(answer.read_text())
        return explained

    def find_silence(self, host: str) -> dict[str, Any]:
        """Return the cause by which ``explain`` on a host names a process that is not heard."""
        causes: list[dict[str, Any]] = self.explain(host)["causes"]
        [silence] = [cause for cause in causes if cause["reason"] == "silent"]
        return silence

    def state(self) -> MonitorState:
        """Return the state of the run, from the log."""

        async def read() -> MonitorState:
            async with connect(f"unix://{self._socket}") as client:
                return await current_state(RedisEventLog(client, RUN))

        return anyio.run(read)

    def seconds_until(self, met: Callable[[MonitorState], Any], patience: float = 300.0) -> float:
        """Wait until the state is as asked for; return the seconds that it took."""
        began = time.monotonic()
        wait_until(lambda: met(self.state()), patience=patience)
        return time.monotonic() - began

    def is_explorer(self, rank: int, status: str) -> Callable[[MonitorState], bool]:
        """Return the condition that an explorer has a status."""

        def met(state: MonitorState) -> bool:
            explorer = state.explorers.get(f"explorer-{rank}")
            return explorer is not None and explorer.shown_status == status

        return met
