"""Generated histories of a run: what anybody might say, and what a sane run says.

``TRINITY_EXAMPLES=50 pytest tests/properties`` looks at fifty times as many, chosen by chance;
without it the examples are the same in every run.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.support.event_histories import (
    RUN,
    committed,
    failed,
    finished,
    opened,
    part,
    registration,
    slot,
    started,
)
from trinity_events.core import Monitor, MonitorState
from trinity_schemas import (
    AlarmCleared,
    AlarmRaised,
    AppliedPhases,
    ConsumerDetached,
    DeadlineReached,
    Envelope,
    Event,
    ExpiredAttempt,
    ExplorerStatusChanged,
    GenerationPaused,
    GenerationResumed,
    LeaseExpired,
    LedgerRestored,
    PhasesMeasured,
    Process,
    Producer,
    ProfileWritten,
    Registration,
    ResendRequested,
    RolloutsDispatched,
    RunClosed,
    RunOpened,
    RunResumed,
    SaveProgressed,
    SaveRequested,
    SaveStarted,
    StacksTaken,
    StepRef,
    StepTrained,
    SyncRequested,
    ThreadCountRegistered,
    TrainedLedger,
    TrainerStatusChanged,
    VersionRefused,
    WaitEnded,
    WaitStarted,
    WeightsApplied,
)

_FACTOR = int(os.environ.get("TRINITY_EXAMPLES", "0"))


def examples(count: int) -> settings:
    """So many examples, always the same ones unless more are asked for."""
    return settings(
        max_examples=count * max(_FACTOR, 1),
        derandomize=not _FACTOR,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


class Said(NamedTuple):
    """One event, by whom, and how its epoch lies to the one that the run is in."""

    by: str
    event: Event
    epoch: int = 0


STEPS = (1, 2, 3)
FILES = ("state_dict", "checkpoint")
HOLDER = Producer(role="actor", rank=0, node="here", incarnation="actor-0")


def _saves() -> list[Said]:
    statements = []
    for step in STEPS:
        for kind in FILES:
            for rank in (0, 1):
                by, at = f"actor-{rank}", {"kind": kind, "rank": rank}
                for attempt in ("x", "y"):
                    save_id = f"{attempt}{step}{kind[0]}{rank}"
                    statements += [
                        Said(by, SaveRequested(save_id=save_id, slot=slot(step, **at), lease=15.0)),
                        Said(by, SaveStarted(save_id=save_id, slot=slot(step, **at), lease=15.0)),
                        Said(by, SaveProgressed(save_id=save_id, slot=slot(step, **at), bytes=4)),
                        Said(by, failed(step, save_id, **at)),
                        Said(by, finished(step, save_id, **at)),
                        Said(by, finished(step, save_id, path=f".staging/s{step}/m", **at)),
                        Said(by, finished(step, save_id, path=f".staging/t{step}/m", **at)),
                        Said(by, started(step, save_id, f".staging/t{step}/m", ranks=2, **at)),
                        Said(by, finished(step, save_id, f".staging/t{step}/m", ranks=2, **at)),
                        Said("reducer-0", lapsed(save_id, step, **at)),
                    ]
            statements.append(Said("reducer-0", DeadlineReached(step=step, kind=kind, seconds=1.0)))
    return statements


def lapsed(save_id: str, step: int, **at) -> LeaseExpired:
    gone = ExpiredAttempt(save_id=save_id, slot=slot(step, **at))
    return LeaseExpired(holder=HOLDER, lease=15.0, attempts=(gone,))


def _commits() -> list[Said]:
    statements = []
    for step in STEPS:
        for kind in FILES:
            for expected in (0, 1, 2):
                registered = registration(kind, expected)
                statements.append(
                    Said("trainer", ThreadCountRegistered(step=step, registration=registered))
                )
                statements.append(Said("trainer", committed(step, kind, registered)))
            named = Registration(
                registration_id="named", kind=kind, expected=1, slots=(slot(step, kind, rank=1),)
            )
            statements.append(Said("trainer", committed(step, kind, named)))
            statements.append(Said("trainer", committed(step, kind)))
        both = (registration("state_dict"), registration("checkpoint"))
        statements.append(Said("trainer", committed(step, "checkpoint", *both)))
        statements.append(Said("trainer", committed(step, "weights")))
        statements += [Said("actor-0", opened(step, 0, 1)), Said("actor-1", opened(step, 1))]
        statements += [Said(f"actor-{rank}", part(step, rank)) for rank in (0, 1)]
    return statements


def _others() -> list[Said]:
    applied = WeightsApplied(
        version=StepRef(1, 1),
        digest="sha256:" + "0" * 64,
        bytes=8,
        verified_at=1.0,
        phases=AppliedPhases(fetch=0.1, pause=0.1),
    )
    detached = ConsumerDetached(group="eval", stream="announcements", position="1-0")
    return [
        Said("trainer", TrainerStatusChanged(status="running", step=2)),
        Said("trainer", RunClosed(reason="finished")),
        Said("explorer-0", ExplorerStatusChanged(status="require_sync")),
        Said("explorer-0", SyncRequested(oldest_version=StepRef(1, 2))),
        Said("explorer-0", ResendRequested(version=StepRef(1, 2))),
        Said("explorer-0", applied),
        Said("explorer-0", GenerationPaused(version=StepRef(1, 1), mode="keep", lease=60.0)),
        Said("explorer-0", GenerationResumed(version=StepRef(1, 1), aborted=3)),
        Said("explorer-0", VersionRefused(version=StepRef(1, 1), rank=0, chunk=2, reason="no")),
        Said("reducer-0", detached),
        Said("trainer", RolloutsDispatched(ordinals=((0, 7),))),
        Said("trainer", RolloutsDispatched(ordinals=((8, 9),))),
        Said("trainer", StepTrained(step=1, trained=((0, 2),), dropped={"filtered": ((3, 3),)})),
        Said("trainer", StepTrained(step=2, trained=((4, 5), (9, 9)))),
        *(
            Said("trainer", LedgerRestored(ledger=ledger, digest=ledger.digest))
            for ledger in _LEDGERS
        ),
        Said("trainer", WaitStarted(wait_id="a", what="rollouts", waits_for=("explorer-0",))),
        Said("trainer", _ALARM),
        Said("trainer", AlarmCleared(alarm="empty_answers", step=2)),
        Said("actor-0", ProfileWritten(step=1, path="profiles/one.json.gz")),
        Said("trainer", WaitEnded(wait_id="a", outcome="over")),
        Said("trainer", StacksTaken(process="explorer-0", node="here", pid=7)),
        Said("actor-0", PhasesMeasured(seconds={"training": 1.0}, phase="training")),
        Said("explorer-0", WaitStarted(wait_id="b", what="weights", seconds=1.0)),
    ]


_ALARM = AlarmRaised(
    alarm="empty_answers", step=1, value=0.5, threshold=0.2, sentence="50% are empty"
)
_LEDGERS = [
    TrainedLedger(step=step, mark=3, next=8, trained=3, fingerprint="sha256:" + "0" * 64)
    for step in (1, 2)
]


_SAVES, _COMMITS, _OTHERS = _saves(), _commits(), _others()
STRATEGIES = ("unrestricted", "single_thread", "single_process", "single_node")
_OPENINGS = [
    Said("opener", event(save_strategy=strategy, **more), 1)
    for strategy in STRATEGIES
    for event, more in ((RunOpened, {}), (RunResumed, {"step": 1}), (RunResumed, {"step": 2}))
]
# Twice in one epoch, which no run of ours does, and anybody can write.
_OPENED_TWICE = [Said("intruder", RunOpened()), Said("intruder", RunResumed(step=1))]


def _said_in_another_epoch(statement: Said, by: int) -> Said:
    return statement._replace(by=f"{statement.by}-of-another", epoch=by)


_ANYTHING = st.one_of(
    st.sampled_from(_COMMITS),
    st.sampled_from(_SAVES),
    st.sampled_from(_SAVES),
    st.sampled_from(_OTHERS),
    st.builds(_said_in_another_epoch, st.sampled_from(_SAVES + _COMMITS), st.sampled_from([-1, 1])),
    st.sampled_from(_OPENINGS + _OPENED_TWICE),
)

Entries = list[tuple[str, Envelope]]


def entries(statements: list[Said], *, first: int = 1000) -> Entries:
    """As a log has it: each producer numbers its own, ids grow; opened once before all."""
    epoch, sequences, written = 0, {}, []
    for number, statement in enumerate([Said("opener", RunOpened(), 1), *statements]):
        by = statement.by
        if isinstance(statement.event, RunOpened | RunResumed) and statement.epoch == 1:
            epoch += 1
            by = f"opener-{epoch}"
        sequences[by] = sequences.get(by, 0) + 1
        at = epoch if by.startswith("opener") else max(epoch + statement.epoch, 0)
        role, _, rank = statement.by.partition("-")
        producer = Producer(
            role=role, rank=int(rank) if rank.isdigit() else 0, node="here", incarnation=by
        )
        envelope = Envelope(
            run_id=RUN,
            epoch=at,
            producer=producer,
            sequence=sequences[by],
            occurred_at=1.0,
            event=statement.event,
        )
        written.append((f"{first + number}-0", envelope))
    return written


@st.composite
def repeated(draw, history: Entries) -> tuple[Entries, Entries]:
    """The history, and the same with some of its entries written again after they were."""
    twice = draw(
        st.lists(
            st.tuples(st.integers(0, len(history) - 1), st.integers(0, len(history) - 1)),
            min_size=1,
            max_size=8,
        )
    )
    with_copies: Entries = []
    for number, (entry_id, envelope) in enumerate(history):
        with_copies.append((entry_id, envelope))
        copies = [history[min(pair)][1] for pair in twice if max(pair) == number]
        milliseconds = entry_id.partition("-")[0]
        with_copies += [(f"{milliseconds}-{n}", copy) for n, copy in enumerate(copies, 1)]
    return history, with_copies


class Scripts(NamedTuple):
    """What each producer of one epoch says, in its own order; and an order of all together."""

    scripts: list[list[Said]]
    turns: list[int]

    def in_turn(self) -> list[Said]:
        """All of it, the producers speaking in their turns."""
        remaining = [iter(script) for script in self.scripts]
        return [next(remaining[turn]) for turn in self.turns]

    def entries(self) -> Entries:
        """As a log has it."""
        return entries(self.in_turn())


@st.composite
def scripts(draw) -> Scripts:
    """A sane epoch: a trainer that registers before it commits, and workers that save."""
    trainer: list[Said] = []
    workers: list[list[Said]] = [[] for _ in range(3)]
    for step in range(1, draw(st.integers(1, 3)) + 1):
        for kind in draw(st.sampled_from([FILES[:1], FILES[1:], FILES, ("weights",)])):
            ranks = draw(st.sets(st.integers(0, 2), min_size=1))
            if kind == "weights":
                trainer.append(Said("trainer", opened(step, *sorted(ranks))))
                trainer.append(Said("trainer", committed(step, "weights")))
            else:
                # Fewer may be registered where the saves say how many they are. Without either,
                # and with none at all, it depends on the order whether more are heard of in time.
                world = len(ranks) if draw(st.booleans()) else None
                fewest = 1 if world else len(ranks)
                expected = registration(kind, draw(st.integers(fewest, len(ranks) + 1)))
                if world and draw(st.booleans()):
                    chosen_ranks = draw(st.sets(st.integers(0, 2), min_size=1))
                    named = tuple(slot(step, kind, rank) for rank in chosen_ranks)
                    expected = Registration(
                        registration_id="named", kind=kind, expected=len(named), slots=named
                    )
                registered = ThreadCountRegistered(step=step, registration=expected)
                trainer.append(Said("trainer", registered))
                trainer.append(Said("trainer", committed(step, kind, expected)))
            for rank in ranks:
                ranks_said = None if kind == "weights" else world
                workers[rank] += draw(_one_save(step, kind, rank, ranks_said))
    sequences = [script for script in (trainer, *workers) if script]
    turns = [number for number, script in enumerate(sequences) for _ in script]
    return Scripts(sequences, draw(st.permutations(turns)))


@st.composite
def _one_save(draw, step: int, kind: str, rank: int, ranks: int | None) -> list[Said]:
    by = f"actor-{rank}"
    if kind == "weights":
        return [Said(by, part(step, rank))] if draw(st.booleans()) else []
    at, statements = {"kind": kind, "rank": rank}, []
    ways = draw(st.lists(st.sampled_from(["fails", "dies", "ends"]), min_size=1, max_size=2))
    for number, way in enumerate(ways):
        save_id = f"{kind[0]}{step}.{rank}.{number}"
        statements.append(Said(by, started(step, save_id, ranks=ranks, **at)))
        if way == "fails":
            statements.append(Said(by, failed(step, save_id, **at)))
        elif way == "ends":
            statements.append(Said(by, finished(step, save_id, ranks=ranks, **at)))
    return statements


@st.composite
def anything(draw, most: int = 40) -> Entries:
    """What anybody might say in any order, about a sane epoch or none; with some of it lost."""
    script = draw(st.one_of(st.just([]), scripts().map(Scripts.in_turn)))
    noise = st.tuples(st.integers(0, most), _ANYTHING)
    statements = script[: most - 5]
    for at, statement in draw(st.lists(noise, max_size=most - len(statements))):
        statements.insert(at, statement)
    lost = draw(st.sets(st.integers(1, most), max_size=3))
    return [entry for number, entry in enumerate(entries(statements)) if number not in lost]


def request(save_id: str, process: Process, rank: int = 0) -> SaveRequested:
    """A worker's request for its turn."""
    return SaveRequested(
        save_id=save_id, slot=slot(1, "checkpoint", rank, save_id), process=process, lease=15.0
    )


def new_monitor() -> Monitor:
    """A fold that has seen nothing."""
    return Monitor(MonitorState(run_id=RUN))
