"""Runs of a training loop of one's own: opened, closed however it ends, and spoken in."""

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
    """Open the run's next epoch, and close it however the block ends; one process of it does.

    Gives the trainer's publisher, which has the ``epoch`` that the other processes are to be told.

    Whoever looks at the run sees how it ended: ``finished``, ``failed`` with the error that left
    the block, or ``interrupted``. SIGTERM, with which launchers end what is left of a job, and
    SIGHUP, which comes when the terminal goes, raise ``SystemExit`` in the block, where the main
    thread enters it and nothing else handles the signal. A process that is killed otherwise says
    nothing.

    Args:
        run: The run's id.
        resume_from: The step that training goes on from, where it does not begin anew.
        config: JSON for the run's other processes: no URLs, no secrets, no absolute paths.
        save_strategy: Which saves may run at once; the run's coordinators are given the same.
        redis_url: The server; without it ``TRINITY_REDIS_URL``, else the embedded one.

    Raises:
        InvalidRunId: when it cannot be a run's id.
        ServerUnreachable, ServerTooOld, InvalidUrl, PermissionDenied: on entering.
        PublishError: when the server did not take the opening; and at the end, when it did not
            take all that was said.
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
        with start_blocking_portal() as portal:  # the caller may have an event loop of its own
            epoch = portal.call(opened, url)
        with publishing(run, epoch, "trainer", redis_url=url) as publisher:
            publisher.publish(TrainerStatusChanged(status="running", step=resume_from or 0))
            try:
                with _ended_by_signals():
                    yield publisher
            except BaseException as error:
                with suppress(PublishError):  # what happened is worth more than that
                    publisher.publish(_closed_by(error))
                raise
            publisher.publish(RunClosed(reason="finished"))


@contextmanager
def publishing(
    run: str, epoch: int, role: str, rank: int = 0, *, redis_url: str | None = None
) -> Iterator[Publisher]:
    """One process's publisher, such as its coordinator needs, and its connection.

    Args:
        run: The run's id.
        epoch: The epoch that the process was given by whoever opened it.
        role: The process's role, in its events, such as ``"actor"``.
        rank: Its rank in that role.
        redis_url: The server; without it ``TRINITY_REDIS_URL``, else the embedded one.

    Raises PublishError at the end, when the log did not take all that was said.
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
    """End the block in order where a signal would end the process without a word."""
    asked: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        asked = [one for one in ending_signals() if signal.getsignal(one) is signal.SIG_DFL]

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one does not wait
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
