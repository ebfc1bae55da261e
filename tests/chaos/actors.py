"""The processes of the chaos tests' run: trainer, workers and consumers, killed at any point.

None of them knows that it will be killed, and each does what a user's would: a trainer that is
started again resumes from the last checkpoint that is ready, a worker saves again what it has not
noted as done, a consumer goes on after what it has noted.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio

from trinity_events.coordinator import CheckpointCoordinator, staged_path
from trinity_events.errors import PublishError, SaveError
from trinity_events.log import Publisher, Stream, SyncEventLog, new_producer, open_run
from trinity_events.server import connect, open_client
from trinity_events.subscriptions import Delivered, subscribe
from trinity_schemas import (
    AppliedPhases,
    RunClosed,
    StepCommitted,
    StepReady,
    StepRef,
    TrainerStatusChanged,
    VersionOpened,
    VersionPartPublished,
    WeightsApplied,
    decode_envelope,
    event_tag,
)

from .plan import (
    FAILS_ONCE,
    LEASE,
    PATIENCE,
    RUN,
    STEPS,
    STRATEGY,
    TURN_DEADLINE,
    WORKERS,
    Place,
    content,
    file_of,
    kinds_of,
    write,
)

DIGEST = "sha256:" + "0" * 64
CLAIM_AFTER = 0.5
LOOK_EVERY = 0.005
SAVE_SECONDS = 0.03
"""So that a save is under way for a moment."""


@contextmanager
def _publisher(url: str, epoch: int, role: str, rank: int = 0) -> Iterator[Publisher]:
    log = SyncEventLog(open_client(url), RUN)
    publisher = Publisher(log, epoch, new_producer(role, rank))
    try:
        yield publisher
        publisher.flush(PATIENCE)
    finally:
        with suppress(PublishError):
            publisher.close(0.1)
        log.close()


def _wait(what: str, happened: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{what} did not come about within {PATIENCE:g} s")
        time.sleep(LOOK_EVERY)


# --- the trainer ---------------------------------------------------------------------------


def trainer(url: str, place: Place) -> None:
    """Train: let each step be saved and published, never more than one ahead of what is ready."""
    pointer = place.run_folder / "latest_checkpointed_iteration.txt"
    begun = int(pointer.read_text()) if pointer.exists() else None
    epoch = anyio.run(partial(_open, url, begun))
    with _publisher(url, epoch, "trainer") as publisher:
        coordinator = CheckpointCoordinator(publisher, place.run_folder)
        ready = _Ready(publisher.log, epoch)
        publisher.publish(TrainerStatusChanged(status="running", step=begun or 0))
        first = (begun or 0) + 1
        for step in range(first, STEPS + 1):
            if step - 2 >= first:
                _wait(f"step {step - 2}", partial(ready.has, step - 2))
                if "checkpoint" in kinds_of(step - 2):
                    _wait(f"file of step {step - 2}", partial(_is_named, pointer, step - 2))
            staged = staged_path(place.run_folder, epoch, step)
            write(place.orders / f"{epoch:03}-{step:03}", str(staged).encode())
            publisher.publish(StepCommitted(step=step, kind="weights"))
            anyio.run(partial(_register, coordinator, step))
        _wait("the last step", lambda: all(map(ready.has, range(first, STEPS + 1))))
        publisher.publish(RunClosed(reason="finished", step=STEPS))


def _is_named(pointer: Path, step: int) -> bool:
    return pointer.exists() and int(pointer.read_text()) >= step


async def _open(url: str, begun: int | None) -> int:
    async with connect(url) as client:
        return await open_run(
            client, RUN, resume_from=begun, save_strategy=STRATEGY, deadline=PATIENCE
        )


async def _register(coordinator: CheckpointCoordinator, step: int) -> None:
    whole = "checkpoint" in kinds_of(step)
    await coordinator.register_and_monitor(
        step,
        is_state_dict=not whole,
        state_dict_thread_count=WORKERS,
        checkpoint_thread_count=WORKERS if whole else 0,
    )


class _Ready:
    """What was announced as ready in an epoch."""

    def __init__(self, log: SyncEventLog, epoch: int) -> None:
        self._log = log
        self._epoch = epoch
        self._after = "0-0"
        self._ready: set[tuple[int, str]] = set()

    def has(self, step: int) -> bool:
        """Whether everything of a step is ready."""
        for entry in self._log.read(self._after, stream=Stream.ANNOUNCEMENTS):
            self._after = entry.id
            event = decode_envelope(entry.payload).event
            if isinstance(event, StepReady) and event.epoch == self._epoch:
                self._ready.add((event.step, event.kind))
        return all((step, kind) in self._ready for kind in kinds_of(step))


# --- the workers ---------------------------------------------------------------------------


def worker(url: str, place: Place, rank: int) -> None:
    """Save what the newest trainer ordered, in its order, and note what is done."""
    while True:
        epoch = _newest_epoch(place)
        if epoch is not None:
            _serve_epoch(url, place, rank, epoch)
        time.sleep(LOOK_EVERY)


def _serve_epoch(url: str, place: Place, rank: int, epoch: int) -> None:
    """Save for one epoch, until there is a newer one."""
    with _publisher(url, epoch, "actor", rank) as publisher:
        coordinator = CheckpointCoordinator(
            publisher,
            place.run_folder,
            strategy=STRATEGY,
            lease=LEASE,
            turn_deadline=TURN_DEADLINE,
        )
        while _newest_epoch(place) == epoch:
            for order in place.given(epoch):
                noted = place.done / f"{order.name}-{rank}"
                if not noted.exists():
                    _serve(coordinator, publisher, place, order)
                    noted.touch()
            time.sleep(LOOK_EVERY)


def _serve(
    coordinator: CheckpointCoordinator, publisher: Publisher, place: Place, order: Path
) -> None:
    step, rank = int(order.name.partition("-")[2]), publisher.producer.rank
    staged = Path(order.read_text())
    if rank == 0:
        publisher.publish(VersionOpened(step=step, ranks=(0,), transport="memory"))
        publisher.publish(
            VersionPartPublished(
                step=step, rank=0, manifest_digest=DIGEST, bytes=8, tensors=1, chunks=1
            )
        )
    while True:
        for kind in ("state_dict", "checkpoint"):
            if kind in kinds_of(step):
                path = staged / file_of(kind, rank)
                save = partial(_save, place, path, step, kind, rank)
                coordinator.save_async(kind, save, step, kind == "state_dict", path=path)
        try:
            coordinator.wait_all()
            break
        except SaveError:
            if _newest_epoch(place) != publisher.epoch:
                return  # another trainer gives the orders now
            time.sleep(LOOK_EVERY)  # the disk may have room again
    publisher.flush(PATIENCE)


def _newest_epoch(place: Place) -> int | None:
    return max((int(file.name.partition("-")[0]) for file in place.given()), default=None)


def _save(place: Place, path: Path, step: int, kind: str, rank: int) -> None:
    if (step, kind, rank) == FAILS_ONCE:
        failed = place.done / "failed-once"
        if not failed.exists():
            failed.touch()
            raise OSError("disk full")
    time.sleep(SAVE_SECONDS)
    write(path, content(step, kind, rank))


# --- the consumers -------------------------------------------------------------------------


def consumer(url: str, place: Place, group: str | None) -> None:
    """Note every announcement: as an explorer that follows, or as a member of a group."""
    anyio.run(partial(_member, url, place, group) if group else partial(_explorer, url, place))


async def _explorer(url: str, place: Place) -> None:
    heard = place.heard("explorer")
    lines = heard.read_text().splitlines() if heard.exists() else []
    start = json.loads(lines[-1])[0] if lines else "beginning"
    with _publisher(url, 1, "explorer") as publisher:
        async with subscribe(RUN, start=start, redis_url=url, wait_for_run=True) as events:
            async for event in events:
                if isinstance(event.event, StepReady) and event.kind == "weights":
                    publisher.publish(_applied(event.event))
                _note(heard, event)


async def _member(url: str, place: Place, group: str) -> None:
    options = {"start": "beginning", "redis_url": url, "claim_after": CLAIM_AFTER}
    options["wait_for_run"] = True
    async with subscribe(RUN, group=group, **options) as events:
        async for event in events:
            _note(place.heard("group"), event)
            await event.ack()


def _applied(ready: StepReady) -> WeightsApplied:
    return WeightsApplied(
        version=StepRef(ready.epoch, ready.step),
        digest=ready.version_digest or DIGEST,
        bytes=8,
        verified_at=time.time(),
        phases=AppliedPhases(fetch=0.0, pause=0.0),
    )


def _note(heard: Path, event: Delivered) -> None:
    line = json.dumps([event.entry_id, event_tag(event.event)]) + "\n"
    # One write: a process that is killed has noted it or has not.
    handle = os.open(heard, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def _end_with_input() -> None:
    while os.read(0, 64):
        pass
    os._exit(0)


def main(role: str, url: str, folder: str) -> None:
    """Be one of the processes, until standard input ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    place = Place(Path(folder))
    match role.partition("-"):
        case ("trainer", _, _):
            trainer(url, place)
        case ("worker", _, rank):
            worker(url, place, int(rank))
        case ("explorer", _, _):
            consumer(url, place, None)
        case ("group", _, _):
            consumer(url, place, "evaluation")


if __name__ == "__main__":
    main(*sys.argv[1:])
