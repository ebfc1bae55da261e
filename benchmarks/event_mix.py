"""Events of a training run, as bytes, with their senders, order and size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from trinity_schemas import (
    AppliedPhases,
    Envelope,
    Event,
    Producer,
    Registration,
    RunOpened,
    SaveFinished,
    SaveProgressed,
    SaveStarted,
    Slot,
    StepCommitted,
    StepRef,
    ThreadCountRegistered,
    VersionOpened,
    VersionPartPublished,
    WeightsApplied,
    encode,
)

RANKS = 8
EXPLORERS = 4
CHECKPOINT_EVERY = 10
PROGRESS = 2
MIX = (
    f"{RANKS} trainer ranks and {EXPLORERS} explorers. Every step: a weight version opened, a "
    "part from each rank, the commit with 8 metrics, each explorer's report. Every "
    f"{CHECKPOINT_EVERY}th step: a checkpoint, with a start, {PROGRESS} reports of progress and a "
    "finish from each rank, its registration and its commit"
)
"""Description of the events for readers of the figures."""

_METRICS = {
    name: 0.123456789 * (at + 1)
    for at, name in enumerate(
        ("loss", "reward/mean", "reward/std", "kl", "entropy", "grad_norm", "lr", "tokens_per_s")
    )
}
_SHARD = 1_288_490_188


class Cast:
    """Processes of one run, each of which numbers its events."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._producers: dict[tuple[str, int], Producer] = {}
        self._sequences: dict[tuple[str, int], int] = {}
        self._now = 1_750_000_000.0

    def say(self, event: Event, role: str = "trainer", rank: int = 0) -> bytes:
        """Return an event as encoded by that process."""
        who = (role, rank)
        if who not in self._producers:
            incarnation = hashlib.sha256(f"{self.run_id}/{role}/{rank}".encode()).hexdigest()[:16]
            self._producers[who] = Producer(
                role=role, rank=rank, node=f"node-{rank // 8:02d}", incarnation=incarnation
            )
        self._sequences[who] = self._sequences.get(who, 0) + 1
        self._now += 0.01
        return encode(
            Envelope(
                run_id=self.run_id,
                epoch=1,
                producer=self._producers[who],
                sequence=self._sequences[who],
                occurred_at=self._now,
                event=event,
            )
        )


def length(steps: int) -> int:
    """Return the number of events that :func:`training` yields up to the end of a step."""
    checkpoints = steps // CHECKPOINT_EVERY
    return 1 + steps * (2 + RANKS + EXPLORERS) + checkpoints * (2 + RANKS * (2 + PROGRESS))


def training(run_id: str) -> Iterator[bytes]:
    """Yield the events of an endless run: see :data:`MIX`."""
    cast = Cast(run_id)
    yield cast.say(RunOpened())
    step = 0
    while True:
        step += 1
        yield from weights(cast, step, RANKS, EXPLORERS)
        if step % CHECKPOINT_EVERY == 0:
            yield from checkpoint(cast, step, RANKS, progress=PROGRESS)


def weights(cast: Cast, step: int, ranks: int, explorers: int = 0) -> Iterator[bytes]:
    """Yield the events of one weight version: a part from each rank, and the explorers' reports."""
    opened = VersionOpened(step=step, ranks=tuple(range(ranks)), transport="redis")
    yield cast.say(opened, "actor")
    for rank in range(ranks):
        part = VersionPartPublished(
            step=step,
            rank=rank,
            manifest_digest=f"sha256:{(step << 16) + rank:064x}",
            bytes=_SHARD,
            tensors=338,
            chunks=308,
            seconds=0.731,
        )
        yield cast.say(part, "actor", rank)
    yield cast.say(StepCommitted(step=step, kind="weights", metrics=_METRICS))
    for rank in range(explorers):
        applied = WeightsApplied(
            version=StepRef(1, step),
            digest=f"sha256:{step:064x}",
            bytes=_SHARD * ranks,
            verified_at=1_750_000_000.5 + step,
            phases=AppliedPhases(fetch=1.25, pause=0.31),
        )
        yield cast.say(applied, "explorer", rank)


def checkpoint(cast: Cast, step: int, ranks: int, progress: int = 0) -> Iterator[bytes]:
    """Yield the events of one checkpoint; each rank writes its shard in the background.

    The commit follows the start of all saves, as in a trainer that does not wait for them.
    """
    expected = Registration(
        registration_id="trainer-0-checkpoint", kind="checkpoint", expected=ranks
    )
    slots = [
        Slot(step=step, kind="checkpoint", role="actor", rank=rank, name="model")
        for rank in range(ranks)
    ]
    # A folder outside of the layout: without files there is nothing to promote.
    folder = f"shards/step_{step}"
    for rank, slot in enumerate(slots):
        started = SaveStarted(save_id=_save_id(slot), slot=slot, path=f"{folder}/model_{rank}.pt")
        yield cast.say(started, "actor", rank)
    yield cast.say(ThreadCountRegistered(step=step, registration=expected))
    yield cast.say(StepCommitted(step=step, kind="checkpoint", registrations=(expected,)))
    for share in range(1, progress + 1):
        for rank, slot in enumerate(slots):
            written = _SHARD * share // (progress + 1)
            so_far = SaveProgressed(save_id=_save_id(slot), slot=slot, bytes=written, total=_SHARD)
            yield cast.say(so_far, "actor", rank)
    for rank, slot in enumerate(slots):
        finished = SaveFinished(
            save_id=_save_id(slot),
            slot=slot,
            path=f"{folder}/model_{rank}.pt",
            bytes=_SHARD,
            seconds=4.2,
            digest=f"sha256:{(step << 16) + rank:064x}",
        )
        yield cast.say(finished, "actor", rank)


def _save_id(slot: Slot) -> str:
    return f"{slot.step:08x}{slot.rank:08x}"
