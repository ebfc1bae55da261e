"""Entries of a log that prove the outcome of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from trinity_schemas import (
    DeadlineReached,
    Envelope,
    Kind,
    LeaseExpired,
    SaveFailed,
    SaveFinished,
    SaveStarted,
    StepCommitted,
    StepFailed,
    StepReady,
    StepSuperseded,
    ThreadCountRegistered,
    VersionOpened,
    VersionPartPublished,
    event_tag,
)

from ..core.fold_state import format_producer, format_slot
from ..core.state import KINDS

Part = Literal["expects", "commits", "starts", "finishes", "fails", "announces"]
_PARTS: tuple[Part, ...] = ("expects", "commits", "starts", "finishes", "fails", "announces")


class ProofEntry(Struct, frozen=True, kw_only=True):
    """Entry, and its part in the proof."""

    id: str
    stream: Literal["events", "announcements"]
    epoch: int
    kind: Kind
    part: Part
    type: str
    by: str
    """The sender's role and rank."""
    what: str
    """Object of the event, in words."""
    final: bool = False
    """True for the event from which the outcome follows."""


class Proof:
    """Collector of the entries that concern a step, in the order of the log.

    Args:
        step: The training step.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._entries: list[ProofEntry] = []
        self._proven: dict[tuple[int, str], set[str]] = {}
        """Epoch and kind to the save ids and digests that the announcement names."""
        self._causes: dict[tuple[int, str], str] = {}

    def add_announcement(self, entry_id: str, envelope: Envelope) -> None:
        """Note an announcement, if it is about the step. Add all of them before the events."""
        event = envelope.event
        if not isinstance(event, StepReady | StepFailed | StepSuperseded):
            return
        if event.step != self.step:
            return
        key = event.epoch, event.kind
        self._causes[key] = event.caused_by
        what = event_tag(event)
        if isinstance(event, StepReady):
            # Attempts that were tried again have several save ids: only these count.
            named = {save.save_id for save in event.saves}
            self._proven[key] = named | {part.manifest_digest for part in event.parts}
            what = event.version_digest or f"{event.save_count} saves"
        elif isinstance(event, StepFailed):
            what = event.reason
        elif isinstance(event, StepSuperseded):
            what = f"by step {event.by.step} of epoch {event.by.epoch}"
        self._add_entry(entry_id, envelope, event.kind, "announces", what, stream="announcements")

    def add(self, entry_id: str, envelope: Envelope) -> None:
        """Note an event, if it is about the step."""
        for kind, part, what, name in self._facts(envelope):
            proven = self._proven.get((envelope.epoch, kind))
            # Of a ready kind, only the attempts that the announcement names prove it.
            counts = part not in ("starts", "fails") and (
                part != "finishes" or not proven or name in proven
            )
            if proven is None or counts:
                self._add_entry(entry_id, envelope, kind, part, what)

    def _facts(self, envelope: Envelope) -> Iterator[tuple[Kind, Part, str, str]]:
        """Yield the kind, the part, the words and the name of each fact of an event."""
        match envelope.event:
            case ThreadCountRegistered(step=self.step, registration=registration):
                yield registration.kind, "expects", f"{registration.expected} saves", ""
            case VersionOpened(step=self.step, ranks=ranks):
                yield "weights", "expects", f"a part of each of {len(ranks)} ranks", ""
            case StepCommitted(step=self.step, kind=kind):
                yield kind, "commits", "the step", ""
            case VersionPartPublished(step=self.step, rank=rank, manifest_digest=digest) as part:
                what = f"the part of rank {rank}, {part.bytes} bytes: {digest}"
                yield "weights", "finishes", what, digest
            case SaveStarted(slot=slot, save_id=name) if slot.step == self.step:
                yield slot.kind, "starts", format_slot(slot), name
            case SaveFinished(slot=slot, save_id=name) as saved if slot.step == self.step:
                digest = f": {saved.digest}" if saved.digest else ""
                yield slot.kind, "finishes", f"{format_slot(slot)}{digest}", name
            case SaveFailed(slot=slot, save_id=name, message=why) if slot.step == self.step:
                yield slot.kind, "fails", f"{format_slot(slot)}: {why}", name
            case LeaseExpired(attempts=attempts, holder=holder):
                for attempt in attempts:
                    if attempt.slot.step == self.step:
                        silent = f"{format_slot(attempt.slot)}: no heartbeat of"
                        yield (
                            attempt.slot.kind,
                            "fails",
                            f"{silent} {format_producer(holder)}",
                            attempt.save_id,
                        )
            case DeadlineReached(step=self.step, kind=kind, seconds=seconds):
                yield kind, "fails", f"not complete {seconds:g} s after its commit", ""
            case _:
                pass

    def _add_entry(
        self,
        entry_id: str,
        envelope: Envelope,
        kind: Kind,
        part: Part,
        what: str,
        *,
        stream: Literal["events", "announcements"] = "events",
    ) -> None:
        self._entries.append(
            ProofEntry(
                id=entry_id,
                stream=stream,
                epoch=envelope.epoch,
                kind=kind,
                part=part,
                type=event_tag(envelope.event),
                by=format_producer(envelope.producer),
                what=what,
                # The entry that the announcement names: the fold announced as it folded that one.
                final=self._causes.get((envelope.epoch, kind)) == entry_id,
            )
        )

    @property
    def entries(self) -> list[ProofEntry]:
        """Entries by epoch, kind and part."""
        # A stable order: entries of one part stay in the order of the log.
        return sorted(
            self._entries,
            key=lambda entry: (entry.epoch, KINDS.index(entry.kind), _PARTS.index(entry.part)),
        )


def format_proof(entry: ProofEntry) -> str:
    """Return an entry of a proof as a line."""
    mark = ">" if entry.final else " "
    return (
        f"{mark} {entry.id:<18} {entry.kind:<10} {entry.part:<9} {entry.type:<23} "
        f"by {entry.by}: {' '.join(entry.what.split())}"
    )
