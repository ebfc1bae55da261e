"""Environment of a benchmark: a server of its own, real processes, prefilled logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import redis

from trinity_events.log import ORIGIN, position
from trinity_events.server import EmbeddedServer, open_client
from trinity_schemas import RUN_INDEX, RunKeys

HERE = Path(__file__).parent.parent
START_DEADLINE = 60.0
"""Maximum seconds until a process becomes active."""
REST_DEADLINE = 180.0
"""Maximum seconds until a reducer has archived the folded entries."""
_LOOK, _LOOKS = 0.25, 3
_IDLE = 0.15
"""Share of a core that counts as idle: a reducer renews its lease and checks its files."""
_GLANCE = 0.02
_PAUSE = 0.005
_A_PAGE = 1000
_A_MILLISECOND = 100
"""Entries per millisecond in a filled log; a busy trainer sends fewer."""

_AGE = 60_000
"""Milliseconds by which a filled log begins in the past, so that no deadline has passed."""

# A page is added by one script: the filling is not measured.
_FILL = """
for i = 4, #ARGV do
  local at = ARGV[2] + i - 4
  local id = string.format('%d-%d', ARGV[1] + math.floor(at / 100), at % 100)
  redis.call('XADD', KEYS[1], id, ARGV[3], ARGV[i])
end
"""


class Stuck(RuntimeError):
    """Raised if a process did not reach its expected state in time."""


class Filled(NamedTuple):
    """Filled log: its entries, bytes, and the numbering of its ids."""

    entries: int
    bytes: int
    first_ms: int

    @property
    def last_id(self) -> str:
        """Id of the last entry."""
        return self.id_of(self.entries - 1)

    def id_of(self, index: int) -> str:
        """Return the id of an entry, counted from 0."""
        return f"{self.first_ms + index // _A_MILLISECOND}-{index % _A_MILLISECOND}"

    def index_of(self, entry_id: str) -> int:
        """Return the number of an entry, from its id."""
        milliseconds, _, number = entry_id.partition("-")
        return (int(milliseconds) - self.first_ms) * _A_MILLISECOND + int(number)


class Stage(NamedTuple):
    """Server of this benchmark alone, and a temporary folder."""

    url: str
    client: redis.Redis
    folder: Path

    @property
    def server(self) -> dict[str, Any]:
        """Return the server's INFO."""
        info: Any = self.client.info()
        return dict(info)


@contextmanager
def stage() -> Iterator[Stage]:
    """Start an embedded server in a temporary folder, with its log on disk, as users have it."""
    with tempfile.TemporaryDirectory(prefix="trinity-bench-") as name:
        folder = Path(name)
        with EmbeddedServer(folder).attached() as url, open_client(url) as client:
            yield Stage(url, client, folder)


class Filler:
    """Writer that appends payloads to a stream, with ids that number them."""

    def __init__(self, client: redis.Redis, key: str, field: str = "e") -> None:
        self._add: Any = client.register_script(_FILL)
        self._key = key
        self._field = field
        self.filled = Filled(0, 0, int(time.time() * 1000) - _AGE)

    def add(self, payloads: Iterable[bytes]) -> Filled:
        """Append payloads; return the totals."""
        source = iter(payloads)
        while page := list(islice(source, _A_PAGE)):
            entries, size, first_ms = self.filled
            self._add(keys=[self._key], args=[first_ms, entries, self._field, *page])
            self.filled = Filled(entries + len(page), size + sum(map(len, page)), first_ms)
        return self.filled


def fill(client: redis.Redis, key: str, payloads: Iterable[bytes], field: str = "e") -> Filled:
    """Append payloads to a new stream."""
    return Filler(client, key, field).add(payloads)


def reset_run(client: redis.Redis, run_id: str, events_from: str) -> None:
    """Reset a run to the state in which its events were just published and never read."""
    client.delete(*RunKeys.of(run_id))
    client.copy(events_from, RunKeys.of(run_id).events)


@contextmanager
def process(
    *arguments: str, home: Path, with_output: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python module in a process that ends with the block or with this process.

    With ``with_output`` its standard output can be read.
    """
    started = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=HERE,
        env={**os.environ, "TRINITY_HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if with_output else subprocess.DEVNULL,
    )
    try:
        yield started
    finally:
        assert started.stdin is not None
        started.stdin.close()
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        if started.stdout is not None:
            started.stdout.close()


@contextmanager
def reducer(on: Stage, run_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the reducer as users do, with archiving and trimming."""
    command = ("trinity_events", "reducer", "--run", run_id, "--redis-url", on.url)
    root = on.folder / "checkpoints"
    with process(*command, "--checkpoint-root", str(root), "--lifeline", home=on.folder) as started:
        yield started


def rest(reducing: psutil.Process) -> None:
    """Wait until a reducer is idle, also with archiving."""
    give_up, looks = time.monotonic() + REST_DEADLINE, 0
    while looks < _LOOKS:
        before = reducing.cpu_times()
        time.sleep(_LOOK)
        after = reducing.cpu_times()
        idle = after.user + after.system - before.user - before.system < _IDLE * _LOOK
        looks = looks + 1 if idle else 0
        if time.monotonic() > give_up:
            raise Stuck(f"the reducer is still at work {REST_DEADLINE:g} s after its last entry")


def answer_of(*arguments: str, home: Path, timeout: float = 600) -> Any:
    """Run a Python module to its end; return the last line of its output, as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=HERE,
        env={**os.environ, "TRINITY_HOME": str(home)},
        stdout=subprocess.PIPE,
        timeout=timeout,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


class Spent(NamedTuple):
    """Resources that a process used from its start to its end."""

    seconds: float
    peak_bytes: int


def spent_by(*arguments: str, home: Path) -> Spent:
    """Run a Python module to its end. Raises an error with its output if it fails."""
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        started = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=HERE,
            env={**os.environ, "TRINITY_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            peak = peak_of(started)
        except BaseException:
            started.kill()
            started.wait()
            raise
        seconds = time.perf_counter() - began
        if started.returncode:
            output.seek(0)
            tail = output.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"{' '.join(arguments)} exited {started.returncode}: {tail}")
    return Spent(seconds, peak)


def peak_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; return its largest sampled resident set, in bytes.

    The kernel's figure at its end includes this process's memory from before the exec.
    """
    watched, peak = psutil.Process(process.pid), 0
    while True:
        with suppress(psutil.Error):  # it may have ended
            peak = max(peak, watched.memory_info().rss)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GLANCE)
            return peak


def list_run(client: redis.Redis, run_id: str) -> None:
    """Add a filled run to the index in which commands look for runs."""
    client.xadd(RUN_INDEX, {"run": run_id})


def wait_for_position(
    client: redis.Redis, run_id: str, target: str | None, deadline: float
) -> tuple[str, float]:
    """Wait until the reducer is at a position, or at any; return the position and the time."""
    key = RunKeys.of(run_id).position
    give_up = time.perf_counter() + deadline
    while True:
        stored: Any = client.get(key)
        now = time.perf_counter()
        # It may be further: the reducer appends timed events of its own.
        if stored is not None and position(stored.decode()) >= position(target or ORIGIN):
            return stored.decode(), now
        if now > give_up:
            where = "at " + stored.decode() if stored else "nowhere"
            raise Stuck(
                f"after {deadline:g} s the reducer of {run_id} is {where}, not at "
                f"{target or 'its first entry'}"
            )
        time.sleep(_PAUSE)
