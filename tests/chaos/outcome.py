"""What became of a run, and whether it kept the promises."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import NamedTuple

from trinity_events.core import MonitorState
from trinity_events.log import Entry, Stream, SyncEventLog
from trinity_events.replay import Replay
from trinity_schemas import (
    EpochOpened,
    Event,
    PublicationStarted,
    RunKeys,
    StepFailed,
    StepReady,
    StepSuperseded,
    VersionRetired,
    decode_envelope,
    encode,
)

from .pipeline import Pipeline
from .plan import RUN, STEPS, WORKERS, Place, content, file_of

Ready = frozenset[tuple[int, str]]


class Outcome(NamedTuple):
    """What can be read of a run when it has come to rest."""

    events: list[Entry]
    announcements: list[Entry]
    replayed: list[bytes]
    """What a replay of the events announces."""
    state: MonitorState

    @property
    def ready(self) -> Ready:
        """The steps and kinds that were announced as ready, in whichever epoch."""
        events = [decode_envelope(entry.payload).event for entry in self.announcements]
        return frozenset(
            (event.step, event.kind) for event in events if isinstance(event, StepReady)
        )


def read(pipeline: Pipeline) -> Outcome:
    """Read the logs of a run that has come to rest."""
    log = SyncEventLog(pipeline.client, RUN)
    events = log.read(limit=100_000)
    announcements = log.read(stream=Stream.ANNOUNCEMENTS, limit=100_000)
    replay = Replay(RUN)
    replayed = [
        encode(announcement)
        for folded in replay.feed(events)
        for announcement in folded.announcements
    ]
    return Outcome(events, announcements, replayed, replay.state)


def missing(pipeline: Pipeline) -> str | None:
    """What a run still lacks before it has come to rest; None when it has."""
    place = pipeline.place
    if not pipeline.processes["trainer"].is_done:
        return f"the trainer has not finished: {len(place.given())} orders were given"
    epoch = int(place.given()[-1].name.partition("-")[0])
    for order in place.given(epoch):
        for rank in range(WORKERS):
            if not (place.done / f"{order.name}-{rank}").exists():
                return f"worker {rank} has not saved step {int(order.name.partition('-')[2])}"
    log = SyncEventLog(pipeline.client, RUN)
    if behind := _not_reduced(pipeline, log.keys):
        return behind
    announced = [entry.id for entry in log.read(stream=Stream.ANNOUNCEMENTS, limit=100_000)]
    for who in ("explorer", "group"):
        lacks = set(announced) - set(heard(place, who))
        if lacks:
            return f"{who} has not heard of {len(lacks)} announcements, such as {min(lacks)}"
    [group] = pipeline.client.xinfo_groups(log.keys.announcements)
    if group["pending"]:
        return f"the group has not acknowledged {group['pending']} announcements"
    return _missing_pointer(place)


def _not_reduced(pipeline: Pipeline, keys: RunKeys) -> str | None:
    """Return what the reducer has not yet read; None when it has read everything."""
    for stream, read_to in ((keys.reports, keys.reported), (keys.events, keys.position)):
        for newest, _ in pipeline.client.xrevrange(stream, count=1):
            if pipeline.client.get(read_to) != newest:
                return f"the reducer has not read {newest.decode()} of {stream}"
    return None


def _missing_pointer(place: Place) -> str | None:
    for name in ("latest_state_dict_iteration.txt", "latest_checkpointed_iteration.txt"):
        path = place.run_folder / name
        pointer = path.read_text() if path.exists() else "nothing"
        if pointer != str(STEPS):
            return f"{name} says {pointer}"
    return None


def heard(place: Place, who: str) -> list[str]:
    """The entries that a consumer has noted."""
    path = place.heard(who)
    return [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []


def faults(place: Place, outcome: Outcome, expected: Ready) -> list[str]:
    """The promises that were broken, in words."""
    problems = [f"{kind} of step {step} was never ready" for step, kind in expected - outcome.ready]
    events = [decode_envelope(entry.payload).event for entry in outcome.announcements]
    once = (StepReady, StepFailed, StepSuperseded, VersionRetired, EpochOpened, PublicationStarted)
    for kind in once:
        subjects = [
            (event.epoch, event.step, getattr(event, "kind", ""))
            for event in events
            if type(event) is kind
        ]
        for subject, times in Counter(subjects).items():
            if times > 1:
                problems.append(f"{kind.__name__} of {subject} was announced {times} times")
    if outcome.replayed != [entry.payload for entry in outcome.announcements]:
        problems.append("a replay does not announce what the reducer announced")
    announced = [entry.id for entry in outcome.announcements]
    if heard(place, "explorer") != announced:
        problems.append("the follower did not hear every announcement once and in order")
    if set(heard(place, "group")) != set(announced):
        problems.append("the group did not handle every announcement")
    problems += [
        f"the log has a {name}: {outcome.state.anomalies}"
        for name in ("gap", "undecodable", "out-of-turn")
        if outcome.state.anomaly_counts.get(name)
    ]
    return problems + _wrong_proofs(events) + _wrong_files(place)


def _wrong_proofs(announced: list[Event]) -> list[str]:
    """What was announced as ready rests on the bytes that were to be saved."""
    problems = []
    for ready in announced:
        for proof in ready.saves if isinstance(ready, StepReady) else ():
            slot = proof.slot
            digest = hashlib.sha256(content(slot.step, slot.kind, slot.rank)).hexdigest()
            if proof.digest != f"sha256:{digest}":
                problems.append(f"{slot} was announced with another digest: {proof.digest}")
    return problems


def _wrong_files(place: Place) -> list[str]:
    """The last checkpoints are there, whole; older folders may have been removed."""
    problems = []
    for step in range(2, STEPS + 1, 2):
        for kind in ("state_dict", "checkpoint"):
            for rank in range(WORKERS):
                path = place.run_folder / f"global_step_{step}" / file_of(kind, rank)
                if not path.exists() or path.read_bytes() != content(step, kind, rank):
                    problems.append(f"{path.parent.parent.name}/{path.name} is not what was saved")
    return problems
