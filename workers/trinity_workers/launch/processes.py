"""The processes around the Ray actors: the reducer, kept alive, and the local Ray, reaped."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import Process
from msgspec import Struct

from trinity_events.errors import TrinityError
from trinity_events.reducer.policy import KEEP_CHECKPOINTS
from trinity_events.server import make_private, open_private, trinity_home

from .ray_reaper import mark_session, remove_sessions

logger = logging.getLogger(__name__)

# Seconds, below the ten after which supervisors kill: Ray has to end as well.
_STOP_DEADLINE = 5.0
_REAPER = Path(__file__).with_name("ray_reaper.py")
_LONGEST_ROOM = 32
"""Bytes that leave Ray's own names room in a socket's path, of which the kernel takes 107."""


class ReducerFailed(TrinityError):
    """The reducer ended again and again.

    Attributes:
        times: Number of its ends in a row.
        status: Exit status of the last.
        log: File of its output.
    """

    times: int
    status: int
    log: Path
    text = "the reducer ended {times} times in a row, last with status {status}: see {log}"


class RestartLimits(Struct, frozen=True, kw_only=True):
    """Limits of the restarts of a reducer.

    Attributes:
        most: Maximum restarts in a row of a reducer that ends soon after its start.
        settled_after: Seconds of work after which its earlier ends are forgotten.
        first_pause: Seconds before the first restart. A reducer that is killed leaves its lead for
            three.
    """

    most: int = 5
    settled_after: float = 60.0
    first_pause: float = 1.0


class ReducerProcess:
    """A reducer in its own process, started again when it dies.

    After a pause that doubles from one end to the next: one that is started while the server is
    away gives up within seconds.
    """

    def __init__(
        self,
        redis_url: str,
        run_id: str,
        checkpoint_root: Path,
        *,
        keep_checkpoints: int = KEEP_CHECKPOINTS,
        adopt_folder: bool = False,
        restart_limits: RestartLimits = RestartLimits(),
    ) -> None:
        self._restart_limits = restart_limits
        self._command = [
            *(sys.executable, "-m", "trinity_events", "reducer", "--lifeline", "--verbose"),
            *("--run", run_id, "--checkpoint-root", str(checkpoint_root)),
            *("--keep-checkpoints", str(keep_checkpoints)),
            *(("--adopt-folder", run_id) if adopt_folder else ()),
        ]
        # By the environment: all users of the host may list commands, with the password in a URL.
        self._environment = {"TRINITY_REDIS_URL": redis_url}
        self._log = trinity_home() / "runs" / run_id / "reducer.log"
        self.restarts = 0
        self._in_a_row = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the reducer running for the block."""
        make_private(self._log.parent.parent)
        self._log.parent.mkdir(exist_ok=True)
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._start_until_ended)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def _start_until_ended(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        process = await self._start()
        task_status.started()
        try:
            while True:
                began = anyio.current_time()
                status = await process.wait()
                await anyio.sleep(self._pause(status, anyio.current_time() - began))
                self.restarts += 1
                process = await self._start()
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)

    def _pause(self, status: int, worked: float) -> float:
        """Seconds until the next start. Raises ReducerFailed when there were enough of them."""
        limits = self._restart_limits
        if worked >= limits.settled_after:
            self._in_a_row = 0
        self._in_a_row += 1
        if self._in_a_row > limits.most:
            raise ReducerFailed(self._in_a_row, status, self._log)
        pause: float = limits.first_pause * 2 ** (self._in_a_row - 1)
        logger.warning("the reducer ended with status %d: started again in %g s", status, pause)
        return pause

    async def _start(self) -> Process:
        # Shielded: cancelled half-way it would leave a process that is never stopped.
        with open_private(self._log, "a") as log, anyio.CancelScope(shield=True):
            # A session of its own: Ctrl-C is ours to hear, and the reducer's last work to do.
            # Its standard input is its lifeline: it ends when we do, however we end.
            return await anyio.open_process(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self._environment},
            )
        raise AssertionError("unreachable")


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(_STOP_DEADLINE):
            await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()


class RayNotStarted(TrinityError):
    """No Ray cluster could be started on this host.

    Attributes:
        reason: Error of Ray, on one line.
    """

    reason: str
    text = (
        "no Ray cluster started on this host ({reason}): start the command again once the host is "
        "less busy, or join a cluster that runs, with RAY_ADDRESS"
    )


def _room_for_ray() -> str:
    """The folder of temporary files; another, where Ray's sockets would have too long names."""
    room = tempfile.gettempdir()
    return room if len(os.fsencode(room)) <= _LONGEST_ROOM else "/tmp"  # noqa: S108


@asynccontextmanager
async def local_ray(cpus: int) -> AsyncIterator[None]:
    """Start a Ray cluster on this host with at least so many CPUs; end it with the block."""
    # Ray reports its usage over the network unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # We hand out GPUs ourselves where there are any; Ray must not hide them from CPU actors.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Its handler of last words would dump stacks on SIGTERM, and abort us in the middle of our end.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    # Its workers would begin at niceness 15: beside other work they hardly get a turn.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_TMPDIR", _room_for_ray())
    import ray

    folder = Path(os.environ["RAY_TMPDIR"], "ray")

    def start() -> int | None:
        remove_sessions(folder)  # of runs that were killed with their reaper
        ray.init(
            address="local",
            # Ray only counts them: with fewer than the run asks for it would place nothing.
            num_cpus=max(cpus, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        return mark_session(folder, os.getpid())

    # The kernel kills Ray's processes when the thread that started them ends, and anyio ends its
    # threads that idle: this one lasts as long as the block. It is not the main thread: there Ray
    # would put a handler of its own in place of ours for SIGTERM, one that ends the process
    # wherever it is.
    async with _reaped():
        with ThreadPoolExecutor(1, thread_name_prefix="ray") as parent:
            lock = None
            try:
                try:
                    lock = await anyio.to_thread.run_sync(lambda: parent.submit(start).result())
                except Exception as error:  # Ray has no class for it: its processes have 30 s
                    raise RayNotStarted(" ".join(str(error).split())) from None
                yield
            finally:
                ray.shutdown()
                if lock is not None:
                    os.close(lock)  # the reaper removes sessions without a lock


@asynccontextmanager
async def _reaped() -> AsyncIterator[None]:
    """Have the block's Ray killed when it or this process has ended: see ``ray_reaper.py``."""
    folder = Path(os.environ["RAY_TMPDIR"], "ray")
    # Isolated and without site: it starts at once, and no module of the user's is imported.
    command = [sys.executable, "-I", "-S", str(_REAPER), str(folder), str(os.getpid())]
    with anyio.CancelScope(shield=True):
        reaper = await anyio.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_STOP_DEADLINE):
            await reaper.aclose()
