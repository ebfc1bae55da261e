"""What a benchmark runs on: a server of its own, real processes, logs that are filled before."""

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
"""Seconds that a process may take until it does something."""
REST_DEADLINE = 180.0
"""Seconds that a reducer may take to archive what it has folded."""
_LOOK, _LOOKS = 0.25, 3
_IDLE = 0.15
"""Share of a core that is no work: a reducer looks after its lead and its files."""
_GLANCE = 0.02
_PAUSE = 0.005
_A_PAGE = 1000
_A_MILLISECOND = 100
"""Entries that a filled log has a millisecond; a busy trainer sends fewer."""

_AGE = 60_000
"""Milliseconds by which a filled log begins in the past: no deadline is over yet."""

# The pages are added in one script each: filling is no part of what is measured.
_FILL = """
for i = 4, #ARGV do
  local at = ARGV[2] + i - 4
  local id = string.format('%d-%d', ARGV[1] + math.floor(at / 100), at % 100)
  redis.call('XADD', KEYS[1], id, ARGV[3], ARGV[i])
end
"""


class Stuck(RuntimeError):
    """A process did not get as far as it should have in time."""


class Filled(NamedTuple):
    """A log that was filled: how many entries, of how many bytes, and how ids count them."""

    entries: int
    bytes: int
    first_ms: int

    @property
    def last_id(self) -> str:
        """The id of the last entry."""
        return self.id_of(self.entries - 1)

    def id_of(self, index: int) -> str:
        """The id of an entry, counted from 0."""
        return f"{self.first_ms + index // _A_MILLISECOND}-{index % _A_MILLISECOND}"

    def index_of(self, entry_id: str) -> int:
        """The reverse."""
        milliseconds, _, number = entry_id.partition("-")
        return (int(milliseconds) - self.first_ms) * _A_MILLISECOND + int(number)


class Stage(NamedTuple):
    """A server that nobody else uses, and a folder that goes away with it."""

    url: str
    client: redis.Redis
    folder: Path

    @property
    def server(self) -> dict[str, Any]:
        """What the server says of itself."""
        said: Any = self.client.info()
        return dict(said)


@contextmanager
def stage() -> Iterator[Stage]:
    """An embedded server in a temporary folder; its log is on disk, as users have it."""
    with tempfile.TemporaryDirectory(prefix="trinity-bench-") as name:
        folder = Path(name)
        with EmbeddedServer(folder).attached() as url, open_client(url) as client:
            yield Stage(url, client, folder)


class Filler:
    """Appends payloads to a stream, with ids that count them."""

    def __init__(self, client: redis.Redis, key: str, field: str = "e") -> None:
        self._add: Any = client.register_script(_FILL)
        self._key = key
        self._field = field
        self.filled = Filled(0, 0, int(time.time() * 1000) - _AGE)

    def add(self, payloads: Iterable[bytes]) -> Filled:
        """Append these; returns what there is in all."""
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
    """Make the run as if its events had just been published and nobody had read them."""
    client.delete(*RunKeys.of(run_id))
    client.copy(events_from, RunKeys.of(run_id).events)


@contextmanager
def process(*arguments: str, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module in a process of its own, which ends with the block or with us."""
    started = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=HERE,
        env={**os.environ, "TRINITY_HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
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


@contextmanager
def reducer(on: Stage, run_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """The reducer as users start it, archiving and trimming."""
    command = ("trinity_events", "reducer", "--run", run_id, "--redis-url", on.url)
    root = on.folder / "checkpoints"
    with process(*command, "--checkpoint-root", str(root), "--lifeline", home=on.folder) as started:
        yield started


def rest(reducing: psutil.Process) -> None:
    """Wait until a reducer has nothing more to do, such as archiving."""
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
    """Run a Python module to its end; the last line that it prints, as JSON."""
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
    """What a process took from its start to its end."""

    seconds: float
    peak_bytes: int


def spent_by(*arguments: str, home: Path) -> Spent:
    """Run a Python module to its end. Raises when it fails, with what it said."""
    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        started = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=HERE,
            env={**os.environ, "TRINITY_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=said,
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
            said.seek(0)
            told = said.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"{' '.join(arguments)} exited {started.returncode}: {told}")
    return Spent(seconds, peak)


def peak_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; returns the largest resident set that it was seen to have, in bytes.

    What the kernel tells at its end counts in ours, which it had before it became its own.
    """
    watched, peak = psutil.Process(process.pid), 0
    while True:
        with suppress(psutil.Error):  # it has just ended
            peak = max(peak, watched.memory_info().rss)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GLANCE)
            return peak


def list_run(client: redis.Redis, run_id: str) -> None:
    """Put a run that was filled into the index, where commands look for it."""
    client.xadd(RUN_INDEX, {"run": run_id})


def wait_for_position(
    client: redis.Redis, run_id: str, wanted: str | None, deadline: float
) -> tuple[str, float]:
    """Wait until the reducer is where it should be, or anywhere; returns where, and when."""
    key = RunKeys.of(run_id).position
    give_up = time.perf_counter() + deadline
    while True:
        found: Any = client.get(key)
        now = time.perf_counter()
        # It may be further on: the reducer appends events of its own, when time passes.
        if found is not None and position(found.decode()) >= position(wanted or ORIGIN):
            return found.decode(), now
        if now > give_up:
            where = "at " + found.decode() if found else "nowhere"
            raise Stuck(
                f"after {deadline:g} s the reducer of {run_id} is {where}, not at "
                f"{wanted or 'its first entry'}"
            )
        time.sleep(_PAUSE)
