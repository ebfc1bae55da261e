"""Ray actors of a run: calls to them, and how one of them died."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread
import redis
from redis.exceptions import RedisClusterException

from trinity_events.diagnostics.waits import NO_REPORTS, WaitReporter
from trinity_events.errors import TrinityError
from trinity_schemas import Process

from ..runtime.process_exit import ExitWatch, format_process

_LAST_REPORT_WITHIN = 1.0
"""Seconds for the last report of a process that a signal ends: supervisors kill after ten."""


class ProcessFailed(TrinityError):
    """A process of the run failed for a reason outside of it, such as a full disk.

    Attributes:
        reason: Error of the operating system.
    """

    reason: str
    text = "a process of the run failed: {reason}"


class ActorDied(TrinityError):
    """The process of an actor ended while it was needed.

    Attributes:
        process: Name and process of the actor.
        how: Signal or status of its end, or what Ray reports of it.
    """

    process: str
    how: str = "nothing is known of why"
    text = "{process} of the run died: {how}"


class Actors:
    """The trainer and the explorers of this machine, by the names that events give them.

    Args:
        actors: Each name with its Ray actor.
        waits: Reporter of long waits for them.
    """

    def __init__(self, actors: Mapping[str, Any], waits: WaitReporter = NO_REPORTS) -> None:
        self._actors = dict(actors)
        self._waits = waits
        self._processes: dict[str, Process] = {}
        self._deaths = ExitWatch()

    async def watch(self) -> None:
        """Watch how their processes end."""
        processes = await self.receive(
            "its processes to start", [actor.process.remote() for actor in self._actors.values()]
        )
        self._processes = dict(zip(self._actors, processes, strict=True))
        for process in processes:
            self._deaths.watch(process)

    async def trainer_answers(self) -> None:
        """Wait until the trainer has answered, with an error too."""
        with suppress(Exception):
            await self._actors["trainer-0"].is_alive.remote()

    async def receive(self, what: str, references: Sequence[Any]) -> list[Any]:
        """Return their answers; the first error ends the wait, and a long one is reported.

        Args:
            what: Name of the wait.
            references: A call of each actor, in their order.

        Raises:
            ActorDied: when one of them died, naming its process and its signal.
        """
        results: dict[str, Any] = {}
        missing = list(self._actors)

        async def collect(name: str, reference: Any) -> None:
            results[name] = await self._answer(name, reference)
            missing.remove(name)
            wait.update(what, missing)

        with self._waits.waiting(what, missing) as wait:
            async with anyio.create_task_group() as tasks:
                for name, reference in zip(self._actors, references, strict=True):
                    tasks.start_soon(collect, name, reference)
        return [results[name] for name in self._actors]

    async def call(self, name: str, method: str, *arguments: object) -> Any:
        """Return what a method of one of them answers.

        Raises:
            ActorDied: if it died.
        """
        return await self._answer(name, getattr(self._actors[name], method).remote(*arguments))

    @asynccontextmanager
    async def reporting_on_cancellation(self, name: str) -> AsyncIterator[None]:
        """Have an actor report its last seconds if a signal cancels the block."""
        try:
            yield
        except anyio.get_cancelled_exc_class():
            with (
                anyio.CancelScope(shield=True),
                anyio.move_on_after(_LAST_REPORT_WITHIN),
                # Whatever it fails by, the process ends next: its last phase has the rest then.
                suppress(Exception),
            ):
                await self._actors[name].report_last_phases.remote()
            raise

    async def replace(self, name: str, actor: Any) -> None:
        """Take an actor in the place of one that died or is given up, and watch its process."""
        import ray

        # One whose engine ended still has its process, and so the place that the new one waits for.
        await anyio.to_thread.run_sync(ray.kill, self._actors[name])
        self._actors[name] = actor
        # First: a death before the new actor answers would else be told of the old process.
        self._processes.pop(name, None)
        self._processes[name] = await self.call(name, "process")
        self._deaths.watch(self._processes[name])

    async def _answer(self, name: str, reference: Any) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await reference
        except RayTaskError as error:
            raise format_ray_error(error) from None
        except RayActorError as error:
            raise await self._died(name, str(error)) from None

    async def _died(self, name: str, message: str) -> ActorDied:
        process = self._processes.get(name)
        how = ""
        if process is not None:
            # Shielded: the error of another may end this wait, and this one says more.
            with anyio.CancelScope(shield=True):
                how = await anyio.to_thread.run_sync(self._deaths.wait, process)
        return find_death(message, name, process, how)


def format_ray_error(error: Any) -> Exception:
    """Return the cause of an error in another process, or the error itself if it is a defect."""
    from ray.exceptions import RayTaskError

    cause = error
    # Nested once for each actor that the call went through.
    while isinstance(cause, RayTaskError) and cause.cause is not None:
        cause = cause.cause
    if isinstance(cause, TrinityError | redis.RedisError | RedisClusterException):
        return cause
    return ProcessFailed(str(cause)) if _is_fault(cause) else error


def _is_fault(cause: object) -> bool:
    return isinstance(cause, OSError) and cause.errno is not None


def find_death(message: str, name: str, process: Process | None = None, how: str = "") -> ActorDied:
    """Return the error of a process that died; its cause is Ray's where the end is not known.

    Args:
        message: Text of Ray's error.
        name: Name of the actor.
        process: Its process, if known.
        how: How the process ended, if known.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    # Ray writes the details of a dead actor as lines of "key: value" after its first line.
    details = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    subject = format_process(name, process)
    if process is None and "pid" in details:
        subject = f"{name} (process {details['pid']})"
    how = how or (lines[0] if lines else "")
    return ActorDied(subject, how) if how else ActorDied(subject)
