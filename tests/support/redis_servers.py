"""Servers of a test's own, on ports: to be killed, replicated, clustered, and given users."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.waits import wait_until
from trinity_events.server import find_binary

OLDEST = "TRINITY_OLDEST_SERVER"
"""Environment variable that names a redis-server of version 7.0, the oldest that is promised."""
_PORTS = range(10_000, 32_768)
"""Ports below those of clients (Linux: net.ipv4.ip_local_port_range)."""
_PLACES = (Path(".oldest-server/redis-server"), Path("/usr/bin/redis-server"))


def oldest_server() -> Path:
    """Return a server of the oldest version that is promised; skip the test where there is none."""
    named = os.environ.get(OLDEST)
    for place in (
        [Path(named)] if named else [Path(__file__).parents[2] / folder for folder in _PLACES]
    ):
        if _is_oldest(place):
            return place
    if named:
        pytest.fail(f"{named}, which {OLDEST} names, is not a Redis server of version 7.0")
    pytest.skip(f"no redis-server 7.0 is at hand: make oldest-server, or name one by {OLDEST}")


def _is_oldest(binary: Path) -> bool:
    try:
        result = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return "Redis server v=7.0." in result.stdout


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now.

    The system gives none of them to a client, so that a server finds its port free after an outage.
    """
    ports: set[int] = set()
    with ExitStack() as listening:
        while len(ports) < count:
            port = secrets.choice(_PORTS)
            with suppress(OSError):  # it is taken
                listening.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.add(port)
    return list(ports)


class Server:
    """One server process; it can be killed and started again on the same data."""

    def __init__(self, folder: Path, *options: str, ports: Sequence[int] = ()) -> None:
        self.folder = folder
        self.port, self.bus = ports or free_ports(2)
        """The second is the one on which it meets the others of its cluster."""
        self.binary = find_binary()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its URL."""
        return f"redis://127.0.0.1:{self.port}"

    def url_of(self, user: str, password: str) -> str:
        """Its URL for a user."""
        return f"redis://{user}:{password}@127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers, to anyone or with a refusal."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [
                *(str(self.binary), "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--dir", str(self.folder), "--logfile", str(self.folder / "log")),
                *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
                *("--cluster-port", str(self.bus)),
                *self._options,
            ]
        )
        wait_until(self._answers, f"no server started: see {self.folder}/log")

    def client(self) -> redis.Redis:
        """A client that never tries twice."""
        return redis.Redis(port=self.port, protocol=2, retry=Retry(NoBackoff(), 0))

    def _answers(self) -> bool:
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.AuthenticationError:
                return True
            except redis.RedisError:
                return False

    def kill(self) -> None:
        """As a power cut: nothing is said to anyone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def servers(folder: Path, count: int, *options: str) -> Iterator[list[Server]]:
    """Some servers, gone on leaving."""
    ports = free_ports(2 * count)  # at once: two that are asked for one by one may be the same
    started = [
        Server(folder / str(number), *options, ports=ports[2 * number : 2 * number + 2])
        for number in range(count)
    ]
    try:
        for server in started:
            server.start()
        yield started
    finally:
        for server in started:
            server.kill()


@contextmanager
def cluster(folder: Path) -> Iterator[list[Server]]:
    """Three nodes that share the slots."""
    with servers(folder, 3, "--cluster-enabled", "yes") as nodes:
        for number, node in enumerate(nodes):
            with node.client() as client:
                slots = (number * 16384 // 3, (number + 1) * 16384 // 3 - 1)
                client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                for other in nodes[:number]:
                    client.execute_command("CLUSTER MEET", "127.0.0.1", other.port, other.bus)
        wait_until(
            lambda: all(_knows_all(node) for node in nodes), "the nodes did not become a cluster"
        )
        yield nodes


def _knows_all(node: Server) -> bool:
    with node.client() as client:
        info = client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and info["cluster_slots_ok"] == "16384"
