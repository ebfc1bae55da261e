"""Simulation of rollouts: a trainer's dispatcher, explorers, and two streams, at random.

The streams, claims and answers follow the design's scripts: each call is atomic and checks the
caller's epoch. The ledger and the audit are the real ones. Trainers die between any two calls, with
the end of their outbox; explorers die, sleep past their claims and answer twice; old trainers wake.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from tests.support.rollout_histories import FINGERPRINT, RUN
from trinity_events.core.ledger import Ledger
from trinity_events.core.ordinal_ranges import ranges
from trinity_schemas import (
    Envelope,
    Event,
    LedgerRestored,
    Producer,
    ReissuedRollout,
    RolloutsDispatched,
    RunOpened,
    RunResumed,
    StepRef,
    StepTrained,
    TrainedLedger,
    encode,
)

STEPS = 12
PER_STEP = 4
WINDOW = 16
LEASE = 20
MOST_ATTEMPTS = 4
MUTANTS = ("none restored", "newest ledger", "any answer counts")


class StaleEpoch(Exception):
    """The caller's epoch is over."""


@dataclass
class Request:
    """Request on the stream; the claim of an explorer ends by itself."""

    epoch: int
    ordinal: int
    attempt: int
    owner: str | None = None
    claimed_until: int = 0


@dataclass
class Checkpoint:
    """Files of a step: the model, which is the list of what it was trained on, and the ledger."""

    at: StepRef
    model: list[int]
    ledger: TrainedLedger


class Server:
    """Streams of requests and answers, the run's epoch, and its log."""

    def __init__(self, mutant: str | None) -> None:
        self.mutant = mutant
        self.epoch = self.now = 0
        self.requests: dict[int, Request] = {}
        self.answers: list[Request] = []
        self.log: list[tuple[str, bytes]] = []
        self.discarded = 0
        self._made = 0

    def check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch

    def open_epoch(self) -> int:
        """Take the next epoch; requests and answers of older ones are withdrawn."""
        self.epoch += 1
        self.requests = {}
        self.answers = []
        return self.epoch

    def issue(self, epoch: int, ordinal: int, attempt: int) -> None:
        """Put a request on the stream in place of earlier attempts at its ordinal."""
        self.check(epoch)
        self.requests = {
            number: one for number, one in self.requests.items() if one.ordinal != ordinal
        }
        self._made += 1
        self.requests[self._made] = Request(epoch, ordinal, attempt)

    def claim(self, name: str) -> tuple[int, Request] | None:
        """Give an explorer a request that no claim covers."""
        for number, request in self.requests.items():
            if request.claimed_until <= self.now:
                request.owner, request.claimed_until = name, self.now + LEASE
                return number, request
        return None

    def answer(self, name: str, number: int, request: Request) -> None:
        """Acknowledge a request, and keep its answer if that counted."""
        self.check(request.epoch)
        found = self.requests.get(number)
        if self.mutant != "any answer counts" and (found is None or found.owner != name):
            self.discarded += 1
            return
        self.requests.pop(number, None)
        self.answers.append(request)


@dataclass
class Trainer:
    """Trainer of one epoch, with its dispatcher; it may be dead, or wake up late."""

    server: Server
    epoch: int
    ledger: Ledger
    model: list[int]
    step: int
    attempts: Counter[int] = field(default_factory=Counter)
    outbox: list[Event | Checkpoint] = field(default_factory=list)
    pending: dict[str, list[int]] = field(default_factory=dict)
    sent: int = 0

    def say(self, event: Event) -> None:
        self.outbox.append(event)

    def flush(self, count: int) -> list[Checkpoint]:
        """Append the first events of the outbox; return the checkpoints that became ready."""
        gone, self.outbox = self.outbox[:count], self.outbox[count:]
        for one in gone:
            if not isinstance(one, Checkpoint):
                self._append(one)
        return [one for one in gone if isinstance(one, Checkpoint)]

    def _append(self, event: Event) -> None:
        self.sent += 1
        name = f"trainer-of-{self.epoch}"
        envelope = Envelope(
            run_id=RUN,
            epoch=self.epoch,
            producer=Producer(role="trainer", rank=0, node="here", incarnation=name),
            sequence=self.sent,
            occurred_at=1.0,
            event=event,
        )
        self.server.log.append((f"{1000 + len(self.server.log)}-0", encode(envelope)))

    def dispatch(self, random: Random) -> None:
        """Ask for the open ordinals of an earlier epoch, then for the next ones in the window."""
        lacking = [one for one in self.ledger.open_ordinals() if not self.attempts[one]]
        first, room = self.ledger.next, self.ledger.mark + WINDOW - self.ledger.next
        new = range(first, first + min(room, random.randrange(PER_STEP + 1)))
        for ordinal in (*lacking, *new):
            self.server.issue(self.epoch, ordinal, 1)
            self.attempts[ordinal] = 1
        if new:
            self.ledger.dispatch(new[0], new[-1])
        if lacking or new:
            asked = ranges([*lacking, *new])
            self.say(RolloutsDispatched(ordinals=asked, fingerprint=FINGERPRINT))

    def reissue(self, random: Random) -> None:
        """Ask again for an ordinal whose attempt took too long; give it up in the end."""
        waiting = [one for one in self.ledger.open_ordinals() if self.attempts[one]]
        answered = {one.ordinal for one in self.server.answers}
        late = [one for one in waiting if one not in answered]
        if not late:
            return
        ordinal = random.choice(late)
        if self.attempts[ordinal] >= MOST_ATTEMPTS:
            self.server.check(self.epoch)
            self.ledger.drop("attempts", [ordinal])
            self.pending.setdefault("attempts", []).append(ordinal)
            return
        self.attempts[ordinal] += 1
        self.server.issue(self.epoch, ordinal, self.attempts[ordinal])
        again = ReissuedRollout(ordinal=ordinal, attempt=self.attempts[ordinal], reason="deadline")
        self.say(RolloutsDispatched(reissued=(again,)))

    def train(self) -> None:
        """Train a step on the lowest open ordinals, once each has its answer."""
        self.server.check(self.epoch)
        answered = [one.ordinal for one in self.server.answers]
        chosen = [one for one in self.ledger.open_ordinals() if one in answered][:PER_STEP]
        lowest = self.ledger.open_ordinals()[: len(chosen)]
        if not chosen or chosen != lowest:
            return
        if self.server.mutant == "any answer counts":
            # A dispatcher that trusts the stream trains on every answer that it finds there.
            chosen = [one for one in answered if one < self.ledger.next][:PER_STEP]
        self.step += 1
        self.model += chosen
        self.ledger.settle(None, ranges(chosen))
        self.server.answers = [one for one in self.server.answers if one.ordinal not in chosen]
        dropped = {reason: ranges(some) for reason, some in self.pending.items()}
        self.pending = {}
        self.say(
            StepTrained(
                step=self.step, trained=ranges(chosen), dropped=dropped, staleness={0: len(chosen)}
            )
        )

    def save(self) -> None:
        """Save a checkpoint, which is ready once the events before it are in the log."""
        contract = self.ledger.to_contract(self.step)
        at = StepRef(self.epoch, self.step)
        self.outbox.append(Checkpoint(at, list(self.model), contract))


class World:
    """A run from its opening to its last step, with everything that may go wrong on the way."""

    def __init__(self, seed: int, mutant: str | None = None) -> None:
        self.random = Random(seed)
        self.server = Server(mutant)
        self.mutant = mutant
        self.ready: list[Checkpoint] = []
        self.old: list[Trainer] = []
        self.held: dict[str, list[tuple[int, Request]]] = {}
        self.crashes = 0
        self.trainer = self._opened(None)

    def run(self) -> World:
        """Run until the last step is trained and the outbox is empty."""
        for turn in range(20_000):
            if self.trainer.step >= STEPS and not self.trainer.outbox:
                return self
            self.server.now += 1
            self._trainer_moves()
            self._explorers_move()
            if self.random.random() < 0.02 and turn < 2000:
                self._crash()
            if self.old and self.random.random() < 0.05:
                self._wake(self.random.choice(self.old))
        raise AssertionError(f"no end: step {self.trainer.step}, {self.trainer.ledger}")

    def _opened(self, checkpoint: Checkpoint | None) -> Trainer:
        epoch = self.server.open_epoch()
        if checkpoint is None:
            event: Event = RunResumed(step=0) if epoch > 1 else RunOpened()
            trainer = Trainer(self.server, epoch, Ledger(fingerprint=FINGERPRINT), [], 0)
            trainer.say(event)
            trainer.flush(1)
            return trainer
        at, ledger = checkpoint.at, checkpoint.ledger
        restored = Ledger.restored(ledger)
        if self.mutant == "none restored":
            restored = Ledger(fingerprint=FINGERPRINT)
        trainer = Trainer(self.server, epoch, restored, list(checkpoint.model), at.step)
        trainer.say(RunResumed(step=at.step, checkpoint=at))
        trainer.flush(1)
        told = restored.to_contract(at.step)
        trainer.say(LedgerRestored(ledger=told, digest=told.digest))
        return trainer

    def _trainer_moves(self) -> None:
        trainer, random = self.trainer, self.random
        move = random.choice(["dispatch", "train", "train", "reissue", "save", "flush", "flush"])
        if move == "save":
            trainer.save()
        elif move == "flush":
            self.ready += trainer.flush(random.randrange(1, 4))
        elif move == "train":
            if trainer.step < STEPS:
                trainer.train()
        elif move == "reissue":
            if random.random() < 0.1:
                trainer.reissue(random)
        else:
            trainer.dispatch(random)

    def _explorers_move(self) -> None:
        name = f"explorer-{self.random.randrange(3)}"
        held = self.held.setdefault(name, [])
        if self.random.random() < 0.5:
            claimed = self.server.claim(name)
            if claimed is not None:
                held.append(claimed)
        elif held:
            at = self.random.randrange(len(held))
            with suppress(StaleEpoch):
                self.server.answer(name, *held[at])
            if self.random.random() < 0.8:  # Else it answers once more, later.
                held.pop(at)
        if self.random.random() < 0.02:
            self.held[name] = []  # It died: its claims lapse.

    def _crash(self) -> None:
        """Kill the trainer with the end of its outbox; the next one resumes what is ready."""
        self.crashes += 1
        self.ready += self.trainer.flush(self.random.randrange(len(self.trainer.outbox) + 1))
        self.old.append(self.trainer)
        checkpoint = self.ready[-1] if self.ready else None
        if checkpoint is not None and self.mutant == "newest ledger":
            newest = self.trainer.ledger.to_contract(checkpoint.at.step)
            checkpoint = Checkpoint(checkpoint.at, checkpoint.model, newest)
        self.trainer = self._opened(checkpoint)

    def _wake(self, trainer: Trainer) -> None:
        """Let a trainer of an old epoch go on: no script takes what it says, nor does the fold."""
        for move in (lambda: trainer.dispatch(self.random), trainer.train):
            with suppress(StaleEpoch):
                move()
        trainer.flush(1)
