"""Context managers for a training loop: open and close a run, and publish its events."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from anyio.from_thread import start_blocking_portal

from trinity_schemas import RunClosed, SaveStrategy, TrainerStatusChanged, check_run_id

from .error_text import cause_of, first_error
from .errors import InvalidRunId, PublishError
from .log import Publisher, SyncEventLog, new_producer, open_run
from .server import connect, open_client, serving, warn_of_eviction
from .signals import ending_signals


@contextmanager
def training_run(
    run: str,
    *,
    resume_from: int | None = None,
    config: str | None = None,
    save_strategy: SaveStrategy = "unrestricted",
    redis_url: str | None = None,
) -> Iterator[Publisher]:
    """Open the run's next epoch, and close it when the block ends; one process of a run calls it.

    Yields the trainer's publisher. Its ``epoch`` is an argument of the run's other processes.

    The log records how the run ended: ``finished``, ``failed`` with the error that left the
    block, or ``interrupted``. SIGTERM and SIGHUP raise ``SystemExit`` in the block if the main
    thread enters it and no other handler is set. A process that is killed otherwise publishes no
    end.

    Args:
        run: The run's id.
        resume_from: Step that training resumes from; None for a new training.
        config: JSON for the run's other processes: no URLs, no secrets, no absolute paths.
        save_strategy: Saves that may run at once; the run's coordinators get the same value.
        redis_url: The server; ``TRINITY_REDIS_URL`` by default, else the embedded server.

    Raises:
        InvalidRunId: if the id is not a slug.
        ServerUnreachable, ServerTooOld, InvalidUrl, PermissionDenied: on entering.
        PublishError: if the server did not accept the first event, or some event by the end.
    """
    try:
        check_run_id(run)
    except ValueError as error:
        raise InvalidRunId(str(error)) from None

    async def opened(url: str) -> int:
        async with connect(url) as client:
            await warn_of_eviction(client, url)
            return await open_run(
                client, run, resume_from=resume_from, config=config, save_strategy=save_strategy
            )

    with serving(redis_url) as url:
        with start_blocking_portal() as portal:  # the caller may run its own event loop
            epoch = portal.call(opened, url)
        with publishing(run, epoch, "trainer", redis_url=url) as publisher:
            publisher.publish(TrainerStatusChanged(status="running", step=resume_from or 0))
            try:
                with _ended_by_signals():
                    yield publisher
            except BaseException as error:
                with suppress(PublishError):  # raise the error of the block instead
                    publisher.publish(_closed_by(error))
                raise
            publisher.publish(RunClosed(reason="finished"))


@contextmanager
def publishing(
    run: str, epoch: int, role: str, rank: int = 0, *, redis_url: str | None = None
) -> Iterator[Publisher]:
    """Connect to the log, and yield the publisher that a process's coordinator needs.

    Args:
        run: The run's id.
        epoch: Epoch that the trainer opened.
        role: Role of the process in its events, such as ``"actor"``.
        rank: Rank of the process in that role.
        redis_url: The server; ``TRINITY_REDIS_URL`` by default, else the embedded server.

    Raises PublishError at the end if the log did not accept every event.
    """
    with serving(redis_url) as url, closing(SyncEventLog(open_client(url), run)) as log:
        publisher = Publisher(log, epoch, new_producer(role, rank))
        try:
            yield publisher
        except BaseException:
            with suppress(PublishError):
                publisher.close()
            raise
        publisher.close()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise SystemExit in the block on a signal that would otherwise kill the process."""
    asked: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        asked = [one for one in ending_signals() if signal.getsignal(one) is signal.SIG_DFL]

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second signal kills the process
        sys.exit(128 + number)

    for one in asked:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in asked:
            if signal.getsignal(one) is end:
                signal.signal(one, signal.SIG_DFL)


def _closed_by(error: BaseException) -> RunClosed:
    if isinstance(first_error(error), (KeyboardInterrupt, SystemExit, asyncio.CancelledError)):
        return RunClosed(reason="interrupted")
    return RunClosed(reason="failed", error=cause_of(error))
