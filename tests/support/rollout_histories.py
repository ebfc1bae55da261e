"""Seeded histories of a trainer's ledger, and a counter of their raw entries.

The counter shares no code with the pipeline: it reads MessagePack maps, and keeps one fate per
ordinal in a dict.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import msgspec

from trinity_schemas import (
    Envelope,
    Event,
    LedgerRestored,
    Producer,
    ReissuedRollout,
    RolloutsDispatched,
    RunClosed,
    RunOpened,
    RunResumed,
    StepRef,
    StepTrained,
    TrainedLedger,
    TrainerStatusChanged,
    encode,
)

RUN = "simulated"
FINGERPRINT = "sha256:" + "1" * 64
REASONS = ("filtered", "attempts")


@dataclass
class Books:
    """Ordinals of a trainer: the next one, and the fate of each that has one."""

    next: int = 0
    fates: dict[int, str] = field(default_factory=dict)

    def copy(self) -> Books:
        return Books(self.next, dict(self.fates))

    @property
    def open(self) -> list[int]:
        return [ordinal for ordinal in range(self.next) if ordinal not in self.fates]

    def contract(self, step: int) -> TrainedLedger:
        mark = min([*self.open, self.next])
        above = [ordinal for ordinal in sorted(self.fates) if ordinal > mark]
        fates = Counter(self.fates.values())
        trained = fates.pop("trained", 0)
        return TrainedLedger(
            step=step,
            mark=mark,
            next=self.next,
            settled=in_ranges(above),
            trained=trained,
            dropped=dict(fates),
            fingerprint=FINGERPRINT,
        )


def in_ranges(ordinals) -> tuple[tuple[int, int], ...]:
    """Ranges of ascending ordinals, some of which end although the next ordinal follows."""
    ranges: list[list[int]] = []
    for ordinal in ordinals:
        if ranges and ordinal == ranges[-1][1] + 1 and ordinal % 7:
            ranges[-1][1] = ordinal
        else:
            ranges.append([ordinal, ordinal])
    return tuple((first, last) for first, last in ranges)


class TrainerHistory:
    """Trainer that dispatches, trains, saves, crashes and resumes, as its random numbers say.

    ``fault`` is one lie that it writes into the last epoch: ``train-twice``, ``train-unasked``,
    ``forget-a-fate``, ``no-ledger``, ``wrong-digest`` or ``skip``.
    """

    def __init__(self, seed: int, *, length: int = 120, fault: str | None = None) -> None:
        self.random = Random(seed)
        self.entries: list[tuple[str, bytes]] = []
        self.epoch = self.step = 0
        self.books = Books()
        self.saved: dict[StepRef, Books] = {}
        self.pending: dict[int, str] = {}
        self.dispatched: set[int] = set()
        self._sequences: Counter[str] = Counter()
        self._fresh()
        moves = [self._dispatch, self._train, self._train, self._drop, self._reissue, self._save]
        for _ in range(length):
            self.random.choice(moves)()
            if self.random.random() < 0.05:
                self._crash()
            if self.random.random() < 0.05:
                self._say_something_of_no_effect()
        if fault is not None:
            self._lie(fault)
        if self.random.random() < 0.5:
            self._say(RunClosed(reason="finished", step=self.step))

    def _say(self, event: Event, *, epoch: int | None = None, by: str | None = None) -> None:
        epoch = self.epoch if epoch is None else epoch
        by = by or f"trainer-of-{epoch}"
        self._sequences[by] += 1
        envelope = Envelope(
            run_id=RUN,
            epoch=epoch,
            producer=Producer(role="trainer", rank=0, node="here", incarnation=by),
            sequence=self._sequences[by],
            occurred_at=1.0,
            event=event,
        )
        self.entries.append((f"{1000 + len(self.entries)}-0", encode(envelope)))

    def _sample(self, ordinals: list[int], most: int) -> list[int]:
        if self.random.random() < 0.6:
            return ordinals[:most]
        return sorted(self.random.sample(ordinals, min(most, len(ordinals))))

    def _dispatch(self) -> None:
        """Ask for what an epoch before it had asked for, then for the next ordinals."""
        again = [ordinal for ordinal in self.books.open if ordinal not in self.dispatched]
        first = self.books.next
        self.books.next += self.random.randrange(1, 12)
        ordinals = [*again, *range(first, self.books.next)]
        self.dispatched.update(ordinals)
        self._say(RolloutsDispatched(ordinals=in_ranges(ordinals), fingerprint=FINGERPRINT))

    def _reissue(self) -> None:
        again = self._sample(
            [ordinal for ordinal in self.books.open if ordinal in self.dispatched], 2
        )
        reasons = [self.random.choice(["deadline", "failed", "stale"]) for _ in again]
        reissued = tuple(
            ReissuedRollout(ordinal=ordinal, attempt=2, reason=reason)
            for ordinal, reason in zip(again, reasons, strict=True)
        )
        self._say(RolloutsDispatched(reissued=reissued))

    def _drop(self) -> None:
        for ordinal in self._sample(
            [ordinal for ordinal in self.books.open if ordinal in self.dispatched], 2
        ):
            self.books.fates[ordinal] = self.pending[ordinal] = self.random.choice(REASONS)

    def _train(self) -> None:
        chosen = self._sample(
            [ordinal for ordinal in self.books.open if ordinal in self.dispatched], 8
        )
        if not chosen:
            return
        self.step += 1
        self.books.fates |= dict.fromkeys(chosen, "trained")
        dropped = {
            reason: in_ranges(
                sorted(ordinal for ordinal, why in self.pending.items() if why == reason)
            )
            for reason in REASONS
            if reason in self.pending.values()
        }
        self.pending = {}
        self._say(
            StepTrained(
                step=self.step,
                trained=in_ranges(chosen),
                dropped=dropped,
                staleness={self.random.randrange(3): len(chosen)},
                metrics={"loss": 0.5},
            )
        )

    def _save(self) -> None:
        self.saved[StepRef(self.epoch, self.step)] = self.books.copy()

    def _crash(self) -> None:
        """Open the run anew, or resume it from a checkpoint, the newest one most often."""
        if self.random.random() < 0.15:
            return self._fresh()
        saved = sorted(self.saved)
        if not saved or self.random.random() < 0.1:
            return self._resume(None)
        return self._resume(saved[-1] if self.random.random() < 0.7 else self.random.choice(saved))

    def _fresh(self) -> None:
        self._begin(0, Books())
        self.saved = {}
        self._say(RunOpened())

    def _resume(self, checkpoint: StepRef | None, *, restore: bool = True) -> None:
        books = self.saved[checkpoint].copy() if checkpoint else Books()
        step = checkpoint.step if checkpoint else 0
        # The checkpoints of a discarded epoch are gone with it, as its folder is set aside.
        surviving = {at for at in self.saved if checkpoint and at <= checkpoint}
        self.saved = {at: books for at, books in self.saved.items() if at in surviving}
        old = self.epoch
        self._begin(step, books)
        self._say(RunResumed(step=step, checkpoint=checkpoint))
        if self.random.random() < 0.2:
            # The trainer of the epoch before wakes up; nothing of it counts.
            self._say(StepTrained(step=step + 1, trained=((0, 4),)), epoch=old)
        if restore and checkpoint and self.random.random() < 0.9:
            ledger = books.contract(step)
            self._say(LedgerRestored(ledger=ledger, digest=ledger.digest))
        elif restore and checkpoint:
            self._resume(checkpoint)  # It crashed before it had told its ledger.

    def _begin(self, step: int, books: Books) -> None:
        self.epoch, self.step, self.books = self.epoch + 1, step, books
        self.pending, self.dispatched = {}, set()

    def _say_something_of_no_effect(self) -> None:
        if self.random.random() < 0.5:
            self._say(TrainerStatusChanged(status="running", step=self.step))
        else:
            payload = self.random.choice(self.entries)[1]  # Said again.
            if b"run-" not in payload:
                self.entries.append((f"{1000 + len(self.entries)}-0", payload))

    def _lie(self, fault: str) -> None:
        self._dispatch()
        self._train()
        self._save()
        at = StepRef(self.epoch, self.step)
        fated = [ordinal for ordinal, fate in self.books.fates.items() if fate == "trained"]
        match fault:
            case "train-twice":
                self._say(StepTrained(step=self.step + 1, trained=in_ranges(fated[-1:])))
            case "train-unasked":
                unasked = self.books.next + 3
                self._say(StepTrained(step=self.step + 1, trained=((unasked, unasked),)))
            case "skip":
                first = self.books.next + 1
                self._say(RolloutsDispatched(ordinals=((first, first),)))
            case "no-ledger":
                self._resume(at, restore=False)
                self._dispatch()
            case "forget-a-fate" | "wrong-digest":
                self._resume(at, restore=False)
                if fault == "forget-a-fate":
                    del self.books.fates[fated[0]]
                ledger = self.books.contract(at.step)
                digest = FINGERPRINT if fault == "wrong-digest" else ledger.digest
                self._say(LedgerRestored(ledger=ledger, digest=digest))


@dataclass
class Count:
    """Count of a lineage, one fate per ordinal."""

    next: int = 0
    fates: dict[int, str] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    recomputed: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    discarded_steps: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def trained(self) -> int:
        return sum(fate == "trained" for fate in self.fates.values())

    @property
    def open(self) -> list[int]:
        return [ordinal for ordinal in range(self.next) if ordinal not in self.fates]


def count_raw(payloads) -> list[Count]:
    """Count the fates of every ordinal, of each lineage that has events of rollouts."""
    opened: list[tuple[int, dict]] = []
    events: dict[int, list[dict]] = {}
    seen: set[tuple[str, int]] = set()
    for payload in payloads:
        raw = msgspec.msgpack.decode(payload, strict=False)
        event, at = raw["event"], raw["epoch"]
        name = raw["producer"]["incarnation"], raw["sequence"]
        if name in seen:
            continue
        seen.add(name)
        if event["type"] in ("run-opened", "run-resumed"):
            opened.append((at, event))
            events[at] = []
        elif at == opened[-1][0]:
            events[at].append(event)
    roots = [at for at, (_, event) in enumerate(opened) if event["type"] == "run-opened"]
    counts = []
    for first, after in zip(roots, [*roots[1:], len(opened)], strict=True):
        count = _count_lineage(opened[first:after], events)
        if count is not None:
            counts.append(count)
    return counts


def _count_lineage(opened, events) -> Count | None:
    numbers = [number for number, _ in opened]
    rollout_events = [
        event for number in numbers for event in events[number] if "rollouts" in event["type"]
    ]
    if not any(
        event["type"] in ("rollouts-dispatched", "step-trained", "ledger-restored")
        for number in numbers
        for event in events[number]
    ):
        return None
    # From the last epoch back to the first, each by the checkpoint that it was resumed from.
    path: list[tuple[int, int | None]] = [(numbers[-1], None)]
    origins = {number: event.get("checkpoint") for number, event in opened}
    while (origin := origins[path[0][0]]) is not None:
        path.insert(0, (origin["epoch"], origin["step"]))
    count = Count()
    for number, last in path:
        if origins[number] is None:
            count = Count(staleness=count.staleness, steps=count.steps)
        _count_epoch(count, events[number], last, resumed=origins[number] is not None)
    dispatched: set[int] = set()
    for event in rollout_events:
        count.recomputed.update(reissued["reason"] for reissued in event.get("reissued", ()))
        ordinals = set(_each(event.get("ordinals", ())))
        count.recomputed["resumed"] += len(dispatched & ordinals)
        dispatched |= ordinals
    steps = [
        event for number in numbers for event in events[number] if event["type"] == "step-trained"
    ]
    count.discarded_steps = len(steps) - count.steps
    return count


def _count_epoch(count: Count, events, last: int | None, *, resumed: bool) -> None:
    for event in events:
        match event["type"]:
            case "ledger-restored":
                _restore(count, event)
                resumed = False
            case "rollouts-dispatched":
                if resumed:
                    count.wrong.append("no ledger")
                    resumed = False
                ordinals = set(_each(event.get("ordinals", ())))
                again = ordinals | {reissued["ordinal"] for reissued in event.get("reissued", ())}
                if again & count.fates.keys():
                    count.wrong.append("dispatched after its fate")
                newest = max([*ordinals, count.next - 1]) + 1
                if not set(range(count.next, newest)) <= ordinals:
                    count.wrong.append("skipped")
                count.next = newest
            case "step-trained":
                if last is not None and event["step"] > last:
                    return
                count.steps += 1
                count.staleness.update({int(k): n for k, n in event.get("staleness", {}).items()})
                _settle(count, "trained", event.get("trained", ()))
                for reason, ordinals in event.get("dropped", {}).items():
                    _settle(count, reason, ordinals)


def _restore(count: Count, event) -> None:
    ledger = event["ledger"]
    fated = {*range(ledger["mark"]), *_each(ledger.get("settled", ()))}
    if count.fates.keys() - fated:
        count.wrong.append("a fate is lost")
    if ledger.get("trained", 0) != count.trained or ledger["next"] > count.next:
        count.wrong.append("another ledger")
    contract = msgspec.convert(ledger, TrainedLedger)
    if contract.digest != event["digest"]:
        count.wrong.append("digest")
    count.next = ledger["next"]
    count.fates = {ordinal: count.fates.get(ordinal, "dropped") for ordinal in fated}
    count.dropped = Counter(ledger.get("dropped", {}))


def _settle(count: Count, fate: str, ordinals) -> None:
    for ordinal in _each(ordinals):
        if ordinal in count.fates:
            count.wrong.append(f"two fates of {ordinal}")
        elif ordinal >= count.next:
            count.wrong.append(f"{ordinal} was never asked for")
        else:
            count.fates[ordinal] = fate
            if fate != "trained":
                count.dropped[fate] += 1


def _each(ranges):
    for first, last in ranges:
        yield from range(first, last + 1)
