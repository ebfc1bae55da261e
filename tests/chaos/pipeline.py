"""A small whole run of real processes on a real server, and who restarts what was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.faulty_proxy import Proxy
from trinity_events.server import find_binary

from .plan import RUN, Place

ROLES = ("reducer", "trainer", "worker-0", "worker-1", "explorer", "group")
REPOSITORY = Path(__file__).parents[2]
RESTARTED_AFTER = 0.1
START_DEADLINE = 20.0


class Process:
    """One of the run's processes; it is started again whenever it was killed on purpose."""

    def __init__(self, role: str, command: list[str], output: Path) -> None:
        self.role = role
        self.stays_dead = False
        """Whether it is to stay dead."""
        self._command = command
        self._output = output
        # Kills come from the proxy's threads, restarts from the one that looks after all.
        self._lock = threading.Lock()
        self._died: float | None = None
        self._start()

    def kill(self, *, for_good: bool = False) -> None:
        """Kill it, and return when it is dead."""
        with self._lock:
            self.stays_dead = for_good
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._died = time.monotonic()

    def send(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    @property
    def is_done(self) -> bool:
        """Whether it ended as it should, by itself."""
        with self._lock:
            return self._died is None and self._process.poll() == 0

    def look(self) -> str | None:
        """Start it again if it was killed on purpose; says if it ended otherwise."""
        with self._lock:
            if self._died is not None:
                if not self.stays_dead and time.monotonic() - self._died > RESTARTED_AFTER:
                    self._start()
                return None
            code = self._process.poll()
            if code is None or (code == 0 and self.role == "trainer"):
                return None
            if "no Redis server answers" in self.last_words():
                self._start()  # it was started while there was none
                return None
            return f"{self.role} ended by itself with {code}: {self.last_words()}"

    def last_words(self) -> str:
        """The end of what it wrote."""
        lines = self._output.read_text(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:])

    def _start(self) -> None:
        with self._output.open("a") as output:
            # Standard input is their lifeline: they end when we do, however that is.
            self._process = subprocess.Popen(
                self._command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=output, stderr=output
            )
        self._died = None


class Pipeline:
    """The processes of one run in a folder; all of them talk to the server through a proxy.

    Args:
        folder: An empty folder with a short path: sockets lie in it.
        durable: Whether the server's file is written through at every command.
        reducer_options: More options of the reducer's command.
        reducers: How many reducers there are.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool = False,
        reducer_options: tuple[str, ...] = (),
        reducers: int = 1,
    ) -> None:
        self.place = Place(folder)
        self.processes: dict[str, Process] = {}
        self.ended: list[str] = []
        """Who ended although nobody killed it."""
        self._durable = durable
        self._reducer_options = reducer_options
        self._reducers = reducers
        self.socket = folder / "redis.sock"
        self.proxy = Proxy(f"unix://{self.socket}", folder / "proxy.sock")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Everything runs inside, and is gone after."""
        self.place.make()
        with ExitStack() as exits:
            exits.callback(self._end)
            self._start("server", self._server())
            self.client = exits.enter_context(self._client())
            self._wait_for_server()
            self._load_scripts()
            exits.enter_context(self.proxy)
            yield

    def start(self, *roles: str) -> None:
        """Start processes, all but the server when none is named."""
        for role in roles or self.roles:
            if role.startswith("reducer"):
                self._start(role, self._reducer())
            else:
                self._start(role, self._actor(role))

    @property
    def roles(self) -> tuple[str, ...]:
        """Every process but the server."""
        return (*ROLES, *(f"reducer-{number}" for number in range(1, self._reducers)))

    def kill(self, role: str, *, for_good: bool = False) -> None:
        """Kill a process; it is started again a little later, or when it is released."""
        self.processes[role].kill(for_good=for_good)

    def release(self, role: str) -> None:
        """Let a process that was killed for good be started again."""
        self.processes[role].stays_dead = False

    def until(self, missing: Callable[[], str | None], seconds: float) -> str | None:
        """Look after the processes until nothing is missing.

        Says what is missing when that was the same for so many seconds, or after a few times as
        many in all: how fast the machine is does not matter, whether it gets on does.
        """
        began = changed = time.monotonic()
        lacks: str | None = "everything"
        while True:
            self.look_after()
            before = lacks
            try:
                lacks = missing()
            except (redis.RedisError, OSError) as error:
                lacks = f"the server does not answer: {error}"
            now = time.monotonic()
            changed = now if lacks != before else changed
            if lacks is None or self.ended or now > min(changed + seconds, began + 4 * seconds):
                return lacks
            time.sleep(0.01)

    def look_after(self) -> None:
        """Start again what was killed, and note what ended otherwise."""
        for process in self.processes.values():
            ended = process.look()
            if ended is not None and ended not in self.ended:
                self.ended.append(ended)

    def last_words(self) -> str:
        """The end of what each process wrote, for whoever looks into a fault."""
        last_lines = {role: process.last_words() for role, process in self.processes.items()}
        del last_lines["server"]
        return "; ".join(f"{role} said: {words}" for role, words in last_lines.items() if words)

    def _start(self, role: str, command: list[str]) -> None:
        output = self.place.folder / f"{role}.out"
        self.processes[role] = Process(role, command, output)

    def _end(self) -> None:
        for process in self.processes.values():
            process.send(signal.SIGCONT)
            process.kill()

    def _server(self) -> list[str]:
        return [
            *(str(find_binary()), "--port", "0", "--unixsocket", str(self.socket)),
            *("--dir", str(self.place.folder), "--save", "", "--appendonly", "yes"),
            *("--appendfsync", "always" if self._durable else "everysec"),
            *("--maxmemory-policy", "noeviction"),
        ]

    def _reducer(self) -> list[str]:
        return [
            *(sys.executable, "-m", "trinity_events", "reducer", "--run", RUN),
            *("--redis-url", self.proxy.url, "--checkpoint-root", str(self.place.root)),
            *("--lifeline", *self._reducer_options),
        ]

    def _actor(self, role: str) -> list[str]:
        folder = str(self.place.folder)
        return [sys.executable, "-m", "tests.chaos.actors", role, self.proxy.url, folder]

    def _client(self) -> redis.Redis:
        return redis.Redis(
            unix_socket_path=str(self.socket),
            protocol=2,
            socket_timeout=5,
            retry=Retry(NoBackoff(), 0),
        )

    def _wait_for_server(self) -> None:
        give_up = time.monotonic() + START_DEADLINE
        while True:
            try:
                self.client.ping()
                return
            except (redis.RedisError, OSError):
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.005)

    def _load_scripts(self) -> None:
        # So that a script is one command, and not a first try that the server does not know.
        for script in files("trinity_events.log").iterdir():
            if script.name.endswith(".lua"):
                self.client.script_load(script.read_text())
