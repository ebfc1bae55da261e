"""Histories for tests: events of a run as envelopes with entry ids, no server needed."""

from __future__ import annotations

from trinity_events.core import Evidence, Monitor, MonitorState
from trinity_schemas import (
    Envelope,
    Event,
    ExplorerExcluded,
    ExplorerStatusChanged,
    Producer,
    Registration,
    RunOpened,
    SaveFailed,
    SaveFinished,
    SaveStarted,
    Slot,
    StepCommitted,
    VersionOpened,
    VersionPartPublished,
    WaitStarted,
)

RUN = "history"
DIGEST = "sha256:" + "0" * 64


class History:
    """Builds entries, each producer numbering its own."""

    def __init__(self, epoch: int = 1, *, opened: bool = True) -> None:
        self.epoch = epoch
        self.entries: list[tuple[str, Envelope]] = []
        self._sequences: dict[str, int] = {}
        if opened:
            self.add(RunOpened())

    def add(
        self,
        event: Event,
        *,
        by: str = "trainer",
        rank: int = 0,
        epoch: int | None = None,
        sequence: int | None = None,
    ) -> str:
        incarnation = f"{by}-{rank}"
        if sequence is None:
            sequence = self._sequences.get(incarnation, 0) + 1
            self._sequences[incarnation] = sequence
        entry_id = f"{1000 + len(self.entries)}-0"
        envelope = Envelope(
            run_id=RUN,
            epoch=self.epoch if epoch is None else epoch,
            producer=Producer(role=by, rank=rank, node="here", incarnation=incarnation),
            sequence=sequence,
            occurred_at=1.0,
            event=event,
        )
        self.entries.append((entry_id, envelope))
        return entry_id

    def fold(self) -> tuple[Monitor, list[Event]]:
        return fold(self.entries)


def fold(entries) -> tuple[Monitor, list[Event]]:
    monitor = Monitor(MonitorState(run_id=RUN))
    events = [announcement.event for entry in entries for announcement in monitor.apply(*entry)]
    return monitor, events


def slot(step: int, kind: str = "state_dict", rank: int = 0, name: str = "model") -> Slot:
    return Slot(step=step, kind=kind, role="actor", rank=rank, name=name)


def registration(kind: str = "state_dict", expected: int = 1, name: str = "r") -> Registration:
    return Registration(registration_id=f"{name}-{kind}", kind=kind, expected=expected)


def started(
    step: int,
    save_id: str = "a",
    path: str | None = None,
    *,
    ranks: int | None = None,
    **at,
) -> SaveStarted:
    return SaveStarted(save_id=save_id, slot=slot(step, **at), path=path, ranks=ranks)


def finished(
    step: int,
    save_id: str = "a",
    path: str | None = None,
    *,
    ranks: int | None = None,
    nbytes: int = 8,
    **at,
) -> SaveFinished:
    return SaveFinished(
        save_id=save_id, slot=slot(step, **at), bytes=nbytes, path=path, ranks=ranks
    )


def failed(step: int, save_id: str = "a", **at) -> SaveFailed:
    return SaveFailed(
        save_id=save_id, slot=slot(step, **at), error_type="OSError", message="disk full"
    )


def committed(step: int, kind: str = "state_dict", *registrations: Registration) -> StepCommitted:
    return StepCommitted(step=step, kind=kind, registrations=registrations)


def opened(step: int, *ranks: int) -> VersionOpened:
    return VersionOpened(step=step, ranks=ranks or (0,), transport="redis")


def part(step: int, rank: int = 0, digest: str = DIGEST) -> VersionPartPublished:
    return VersionPartPublished(
        step=step, rank=rank, manifest_digest=digest, bytes=8, tensors=1, chunks=1
    )


def verified(epoch: int, *steps: int, kinds=("checkpoint",)) -> dict[int, Evidence]:
    """Folders of an epoch with the marks that the reducer gave them."""
    return {step: Evidence(epoch=epoch, step=step, kinds=kinds) for step in steps}


def publish_weights(history: History, step: int) -> None:
    """A whole weight version."""
    history.add(opened(step))
    history.add(part(step))
    history.add(committed(step, "weights"))


def lasting_cause_after_waits() -> History:
    """An explorer excluded ten seconds ago, after twenty waits of a moment in the causes' order."""
    history = History()
    for rank in (0, 99):
        history.add(ExplorerStatusChanged(status="running"), by="explorer", rank=rank)
    history.add(ExplorerExcluded(explorer="explorer-99", malformed=3, reason="its reward is inf"))
    began = len(history.entries)
    for rank in range(20):
        wait = WaitStarted(wait_id=f"w{rank}", what="a reward", waits_for=(f"reward-{rank}",))
        history.add(wait, by="explorer", rank=rank)
    history.entries[began:] = [
        (f"{11_000 + number}-0", envelope)
        for number, (_, envelope) in enumerate(history.entries[began:])
    ]
    return history
