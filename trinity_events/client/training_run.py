"""Context managers for a training loop: open and close a run, and publish its events."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from types import TracebackType

from anyio.from_thread import start_blocking_portal

from trinity_schemas import RunClosed, SaveStrategy, check_run_id

from ..errors import InvalidRunId, PublishError, RunOpenedTwice
from ..log import (
    DEADLINE,
    STATUS_LEASE,
    Publisher,
    SyncEventLog,
    new_producer,
    open_run,
    renewing_trainer_lease,
)
from ..server import connect, open_client, serving, warn_of_eviction
from ..system.error_text import first_error, format_cause
from ..system.signals import exiting_on_signals

logger = logging.getLogger(__name__)


def training_run(
    run: str,
    *,
    resume_from: int | None = None,
    config: str | None = None,
    save_strategy: SaveStrategy = "unrestricted",
    redis_url: str | None = None,
    deadline: float = DEADLINE,
    lease: float = STATUS_LEASE,
) -> TrainingRun:
    """Return the next epoch of a run, for one process of the run to open and to close.

    ``with training_run("grpo-7b") as run`` opens the epoch and yields the trainer's publisher. Its
    ``epoch`` is an argument of the run's other processes. The run is closed however the block ends.
    Callbacks have no block, and call :meth:`TrainingRun.open` and :meth:`TrainingRun.close`.

    The log records how the run ended: ``finished``, ``failed`` with the error that left the
    block, or ``interrupted``. A run that is open when its process ends is ``interrupted``. SIGTERM
    and SIGHUP raise ``SystemExit`` in the block if the main thread enters it and no other handler
    is set. A process that is killed otherwise publishes no end.

    Args:
        run: The run's id.
        resume_from: Step that training resumes from; None for a new training.
        config: JSON for the run's other processes: no URLs, no secrets, no absolute paths.
        save_strategy: Saves that may run at once; the run's coordinators get the same value.
        redis_url: The server; ``TRINITY_REDIS_URL`` by default, else the embedded server.
        deadline: Seconds for which each wait for a server that is away lasts.
        lease: Seconds without a heartbeat of this process after which its trainer is silent.

    Raises:
        InvalidRunId: on opening, if the id is not a slug.
        ServerUnreachable, ServerTooOld, InvalidUrl, PermissionDenied: on opening.
        RunOpenedTwice: on opening a run that this object opened before.
        PublishError: if the server did not accept the first event, or some event by the end.
    """
    return TrainingRun(
        run,
        _opened(
            run,
            resume_from=resume_from,
            config=config,
            save_strategy=save_strategy,
            redis_url=redis_url,
            deadline=deadline,
            lease=lease,
        ),
    )


class TrainingRun:
    """One epoch of a run in the process that opens and closes it: see :func:`training_run`."""

    def __init__(self, run: str, opened: AbstractContextManager[Publisher]) -> None:
        self.run_id = run
        self._unopened: AbstractContextManager[Publisher] | None = opened
        self._opened: AbstractContextManager[Publisher] | None = None

    def open(self) -> Publisher:
        """Open the run's next epoch; return the trainer's publisher."""
        if self._unopened is None:
            raise RunOpenedTwice(self.run_id)
        # Taken before it is entered: an epoch that failed to open is not opened a second time.
        opened, self._unopened = self._unopened, None
        publisher = opened.__enter__()
        self._opened = opened
        # Last: a run that did not open has nothing to close.
        _left_open[self] = os.getpid()
        return publisher

    def close(self, error: BaseException | None = None) -> None:
        """Close the run: as finished, or with the error that ended training; once.

        Blocks until the log has all that was published, for the run's deadline at most, and for 5
        seconds after an error. Raises PublishError when the log has not, unless ``error`` is
        given, which is worth more.
        """
        # Taken first, so that a close within a close does nothing.
        opened, self._opened = self._opened, None
        _left_open.pop(self, None)
        if opened is not None:
            if error is None:
                opened.__exit__(None, None, None)
            else:
                opened.__exit__(type(error), error, error.__traceback__)

    def __enter__(self) -> Publisher:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)


_left_open: dict[TrainingRun, int] = {}
"""Runs that are open, with the process that opened each; a forked process closes none of them."""


@atexit.register
def _interrupt_all() -> None:
    """Close what a process leaves open: later, when its generators are finalized, is too late."""
    # A copy, because close() removes its run.
    for run, process in list(_left_open.items()):
        if process == os.getpid():
            logger.warning(
                "run %s was left open by the process that ends, and is closed as interrupted: "
                "close it, or open it by a with statement",
                run.run_id,
            )
            run.close(SystemExit())


@contextmanager
def _opened(
    run: str,
    *,
    resume_from: int | None,
    config: str | None,
    save_strategy: SaveStrategy,
    redis_url: str | None,
    deadline: float,
    lease: float,
) -> Iterator[Publisher]:
    """Open the run's next epoch, and close it however the block ends."""
    try:
        check_run_id(run)
    except ValueError as error:
        raise InvalidRunId(run, str(error)) from None

    async def opened(url: str) -> int:
        async with connect(url) as client:
            await warn_of_eviction(client, url)
            return await open_run(
                client,
                run,
                resume_from=resume_from,
                config=config,
                save_strategy=save_strategy,
                deadline=deadline,
            )

    # Held for the whole run: the embedded server ends with its last user.
    with serving(redis_url) as url:
        with start_blocking_portal() as portal:  # the caller may run its own event loop
            epoch = portal.call(opened, url)
        with publishing(run, epoch, "trainer", redis_url=url, deadline=deadline) as publisher:
            try:
                with (
                    renewing_trainer_lease(publisher, lambda: resume_from or 0, lease=lease),
                    # Inside of the lease: the exit that a signal raises still publishes the run's
                    # end.
                    exiting_on_signals(),
                ):
                    yield publisher
            # Also KeyboardInterrupt and SystemExit, which the log records as an interruption.
            except BaseException as error:
                with suppress(PublishError):  # raise the error of the block instead
                    publisher.publish(_closed_by(error))
                raise
            # Outside of the try: an error of this event is no failure of the training.
            publisher.publish(RunClosed(reason="finished"))


@contextmanager
def publishing(
    run: str,
    epoch: int,
    role: str,
    rank: int = 0,
    *,
    redis_url: str | None = None,
    deadline: float = DEADLINE,
) -> Iterator[Publisher]:
    """Connect to the log, and yield the publisher that a process's coordinator needs.

    Args:
        run: The run's id.
        epoch: Epoch that the trainer opened.
        role: Role of the process in its events, such as ``"actor"``.
        rank: Rank of the process in that role.
        redis_url: The server; ``TRINITY_REDIS_URL`` by default, else the embedded server.
        deadline: Seconds for which the publisher waits for a server that is away, also at the end
            of a block without an error.

    Raises PublishError at the end if the log did not accept every event.
    """
    with serving(redis_url) as url, closing(SyncEventLog(open_client(url), run)) as log:
        publisher = Publisher(log, epoch, new_producer(role, rank), deadline=deadline)
        try:
            yield publisher
        except BaseException:
            with suppress(PublishError):
                # Without the deadline: a failed block must not wait long for a server that is away.
                publisher.close()
            raise
        publisher.close(deadline)


_INTERRUPTS = (KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit)


def _closed_by(error: BaseException) -> RunClosed:
    # A task group wraps the interrupt of one of its tasks.
    if isinstance(first_error(error), _INTERRUPTS):
        return RunClosed(reason="interrupted")
    return RunClosed(reason="failed", error=format_cause(error))
