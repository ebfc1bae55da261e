"""Log, reducer and subscriptions of one run in one process, for unit tests."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, TypeVar, cast

import anyio
from msgspec import Struct

from trinity_schemas import (
    Envelope,
    Event,
    Kind,
    Registration,
    RunOpened,
    RunResumed,
    StepCommitted,
    VersionOpened,
    VersionPartPublished,
    decode_envelope,
)

from ..coordinator import CheckpointCoordinator
from ..core import FilePlan, Monitor, MonitorState, decode_state, encode_state, plan_files
from ..errors import DeadlineExceeded, StructuredError
from ..log import AsyncPublisher, Entry, EventLog, Publisher, Stream, new_producer, opening_envelope
from ..log.memory.event_log import MemoryEventLog, SyncMemoryEventLog
from ..reducer import CheckpointFiles, Reducer
from ..subscriptions import CLAIM_AFTER, MAX_DELIVERIES, Subscription, subscription_on

E = TypeVar("E", bound=Struct)

DEADLINE = 10.0
"""Seconds after which a wait fails its test with what was missing."""
# Nothing renews it here, as reducer/leader.py does in a process.
_LEASE = 365 * 86400.0
# No bytes are published, and the schema of a part wants a digest.
_DIGEST = "sha256:" + "0" * 64


class PipelineMisused(StructuredError, RuntimeError):
    """A pipeline is used outside of its block, or entered twice.

    Attributes:
        fault: ``outside`` of the block, ``running`` already, or ``other`` pipeline on the log.
        run_id: The run.
    """

    fault: Literal["outside", "running", "other"]
    run_id: str
    texts: ClassVar = {
        "outside": "the pipeline is not running: enter it with: async with pipeline as run",
        "running": "the pipeline of run {run_id} is already running",
        "other": "another pipeline runs on the log of {run_id}: leave it first",
    }


class Pipeline:
    """Run in memory: ``async with Pipeline("run") as run:``.

    The in-memory log passes the same contract tests as the log on a server. The reducer, the
    fold, the subscriptions, the coordinator and the checkpoint files are the real ones. Entering
    opens the run's next epoch and starts the reducer; leaving stops it. The log stays readable.

    Args:
        run_id: The run.
        checkpoint_folder: The run's checkpoint directory, whose files follow the state.
        log: The log; that of another pipeline goes on with its run.
    """

    def __init__(
        self,
        run_id: str = "test",
        *,
        checkpoint_folder: Path | None = None,
        log: MemoryEventLog | None = None,
    ) -> None:
        self.log = MemoryEventLog(run_id) if log is None else log
        self.checkpoint_folder = checkpoint_folder
        self._epoch = 0
        self._monitor = Monitor(MonitorState(run_id=self.run_id))
        self._files = _Files(checkpoint_folder) if checkpoint_folder is not None else None
        self._reducer: asyncio.Task[None] | None = None
        self._scope: anyio.CancelScope | None = None
        self._token = 0
        self._idle_at: str | None = None
        self._turned = asyncio.Event()
        self._trainer: AsyncPublisher | None = None

    @property
    def run_id(self) -> str:
        """The run."""
        return self.log.run_id

    @property
    def epoch(self) -> int:
        """The epoch that was opened last, which new publishers get."""
        if not self._epoch:
            raise PipelineMisused("outside", self.run_id)
        return self._epoch

    async def __aenter__(self) -> Pipeline:
        if self._reducer is not None:
            raise PipelineMisused("running", self.run_id)
        self._token, _ = await self.log.lead(_LEASE)
        if not self._token:
            raise PipelineMisused("other", self.run_id)
        await self._open(RunOpened())
        self._scope, self._idle_at = anyio.CancelScope(), None
        # No task group, since fixtures are torn down in another task; and no task.cancel(), which
        # would not wait for a thread that is writing files.
        self._reducer = asyncio.create_task(self._reduce(self._scope))
        self._reducer.add_done_callback(lambda _: self._turned.set())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._reducer is not None
        assert self._scope is not None
        self._scope.cancel()
        [outcome] = await asyncio.gather(self._reducer, return_exceptions=True)
        self._reducer = None
        # Gives up the lead, so that another pipeline may enter the log.
        await self.log.renew(self._token, 0)
        # The test's own error comes first: the reducer's may be its consequence.
        if exc is None and isinstance(outcome, Exception):
            raise outcome

    def publisher(self, role: str, rank: int = 0) -> AsyncPublisher:
        """Return a publisher in the present epoch, with a producer of its own."""
        return AsyncPublisher(self.log, self.epoch, new_producer(role, rank))

    def coordinator(self, role: str = "actor", rank: int = 0) -> CheckpointCoordinator:
        """Return a worker's coordinator in the present epoch; its saves run in real threads.

        Call its ``wait_all()`` at the end: leaving the pipeline does not wait for saves.
        """
        log = SyncMemoryEventLog(self.log)
        publisher = Publisher(log, self.epoch, new_producer(role, rank))
        return CheckpointCoordinator(publisher, self.checkpoint_folder)

    def subscribe(
        self,
        *types: type[E],
        start: str = "current",
        group: str | None = None,
        wait_for_run: bool = False,
        deadline: float | None = DEADLINE,
        claim_after: float = CLAIM_AFTER,
        max_deliveries: int = MAX_DELIVERIES,
    ) -> Subscription[E]:
        """Subscribe to this run as :func:`trinity_events.subscribe`, but with a deadline.

        The run always exists here, so ``wait_for_run`` has no effect.
        """
        return subscription_on(
            lambda: nullcontext(self.log),
            self.run_id,
            *types,
            start=start,
            group=group,
            deadline=deadline,
            claim_after=claim_after,
            max_deliveries=max_deliveries,
        )

    @property
    def state(self) -> MonitorState:
        """Copy of the run's state after the newest event."""
        return decode_state(encode_state(self._folded()))

    @property
    def events(self) -> list[Event]:
        """Published events, oldest first."""
        return self._read_events(Stream.EVENTS)

    @property
    def announcements(self) -> list[Event]:
        """Announcements of the reducer, oldest first; see :meth:`settled`."""
        return self._read_events(Stream.ANNOUNCEMENTS)

    async def settled(self, deadline: float = DEADLINE) -> None:
        """Wait until every published event is folded and announced, and the files follow.

        Raises DeadlineExceeded, or the error of the reducer.
        """
        with anyio.move_on_after(deadline):
            while not self._is_settled():
                self._turned.clear()
                await self._turned.wait()
            return
        raise DeadlineExceeded(
            f"the reducer of run {self.run_id} did not come to rest",
            deadline,
            f"it was last idle at {self._idle_at}, and the log ends at {self.log.last_id_now()}",
        )

    async def resume(self, step: int) -> int:
        """Open the next epoch from a step, as a restarted trainer does; return the epoch."""
        await self._open(RunResumed(step=step))
        return self.epoch

    async def make_ready(self, step: int, kind: Kind = "weights") -> None:
        """Publish the events that make a step ready, without data; wait until they are settled."""
        if self._trainer is None or self._trainer.epoch != self.epoch:
            self._trainer = self.publisher("trainer")
        registrations: tuple[Registration, ...] = ()
        if kind == "weights":
            await self._trainer.publish(VersionOpened(step=step, ranks=(0,), transport="memory"))
            await self._trainer.publish(
                VersionPartPublished(
                    step=step, rank=0, manifest_digest=_DIGEST, bytes=0, tensors=0, chunks=0
                )
            )
        else:
            # It expects no save, so that the commit alone completes the kind
            # (core/completeness.py).
            none = Registration(registration_id=f"none-{kind}-{step}", kind=kind, expected=0)
            registrations = (none,)
        await self._trainer.publish(
            StepCommitted(step=step, kind=kind, registrations=registrations)
        )
        await self.settled()

    async def _open(self, event: Event) -> None:
        self._epoch = await self.log.open_epoch(opening_envelope(self.run_id, event))

    async def _reduce(self, scope: anyio.CancelScope) -> None:
        with scope:
            # _Watched delegates the port's methods, which the type checker does not see.
            log = cast(EventLog, _Watched(self.log, self._idle))
            await Reducer(log, self._files, self._token).run()
            raise RuntimeError(f"the reducer of run {self.run_id} lost its lead")

    def _idle(self, position: str) -> None:
        self._idle_at = position
        self._turned.set()

    def _is_settled(self) -> bool:
        if self._reducer is None:
            raise PipelineMisused("outside", self.run_id)
        if self._reducer.done():
            # Raises the error that ended it, in the place of a wait until the deadline.
            self._reducer.result()
        # Idle at the end of the log means folded and committed; reports are no entries yet.
        if self._idle_at != self.log.last_id_now() or self.log.has_reports_now():
            return False
        # Compared with a fold of the pipeline's own: the state of the reducer may be in change.
        return self._files is None or self._files.done == plan_files(self._folded())

    def _folded(self) -> MonitorState:
        while entries := self.log.read_now(self._monitor.state.position):
            self._monitor.fold(entries)
        return self._monitor.state

    def _read_events(self, stream: Stream) -> list[Event]:
        entries = self.log.read_now(stream=stream, limit=2**62)
        return [envelope.event for entry in entries if (envelope := _decoded(entry)) is not None]


class _Watched:
    """Log of the reducer, which reports when the reducer waits for new entries.

    The reducer waits only after it folded and committed every entry, and reconciled the files.
    """

    def __init__(self, log: MemoryEventLog, idle: Any) -> None:
        self._log = log
        self._idle = idle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def read_blocking(
        self, after: dict[Stream, str], *, seconds: float, limit: int
    ) -> list[tuple[Stream, Entry]]:
        self._idle(after[Stream.EVENTS])
        return await self._log.read_blocking(after, seconds=seconds, limit=limit)


class _Files(CheckpointFiles):
    """Checkpoint files of a run, with the last plan that they followed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.parent, folder.name)
        self.done: FilePlan | None = None

    def reconcile(self, plan: FilePlan) -> bool:
        promoted = super().reconcile(plan)
        self.done = plan
        return promoted


def _decoded(entry: Entry) -> Envelope | None:
    try:
        return decode_envelope(entry.payload)
    except ValueError:
        return None  # a dead letter
