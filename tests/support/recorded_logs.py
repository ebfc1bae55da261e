"""Make the recorded logs of tests/recorded.

Run by hand: python -m tests.support.recorded_logs [--renew].

The bytes of a log that is there are never written again: they stand for what was written once.
--renew folds them anew and writes what they came to; a difference to what was stored is a change
of meaning, to be explained in the commit that makes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
from msgspec import structs

from tests.support.event_histories import (
    committed,
    failed,
    finished,
    opened,
    part,
    registration,
    slot,
    started,
)
from trinity_events.archive.format import Header, line_of, read_lines, write_lines
from trinity_events.core import Monitor, MonitorState
from trinity_events.log import Entry
from trinity_schemas import (
    AppliedPhases,
    ConsumerDetached,
    DeadlineReached,
    Envelope,
    ExpiredAttempt,
    ExplorerStatusChanged,
    LeaseExpired,
    LedgerRestored,
    Producer,
    Registration,
    ReissuedRollout,
    RolloutsDispatched,
    RunClosed,
    RunOpened,
    RunResumed,
    SaveProgressed,
    SaveRequested,
    StepFailed,
    StepRef,
    StepTrained,
    SyncRequested,
    ThreadCountRegistered,
    TrainedLedger,
    TrainerStatusChanged,
    VersionOpened,
    VersionRefused,
    WaitEnded,
    WaitStarted,
    WeightsApplied,
    encode,
    to_json,
)

FOLDER = Path(__file__).parents[1] / "recorded"
BEGAN = 1_760_000_000_000
TASK_SET = "sha256:" + "7" * 64


class Tape:
    """Entries as a server would hold them, a quarter of a second apart."""

    def __init__(self, name, epoch=1):
        self.run_id = f"recorded-{name}"
        self.epoch = epoch
        self.entries: list[Entry] = []
        self._sequences: dict[str, int] = {}

    def envelope(self, event, by="trainer", rank=0, *, epoch=None, skip=0, run_id=None):
        """The next envelope of a producer, which may have skipped some."""
        incarnation = f"{by}-{rank}-life-1"
        sequence = self._sequences.get(incarnation, 0) + 1 + skip
        self._sequences[incarnation] = sequence
        return Envelope(
            run_id=run_id or self.run_id,
            epoch=self.epoch if epoch is None else epoch,
            producer=Producer(role=by, rank=rank, node=f"node-{rank}", incarnation=incarnation),
            sequence=sequence,
            occurred_at=self._now() / 1000,
            event=event,
        )

    def add(self, event, by="trainer", rank=0, **how):
        self.put(encode(self.envelope(event, by, rank, **how)))

    def put(self, payload):
        self.entries.append(Entry(f"{self._now()}-0", payload))

    def again(self, back=1):
        """The entry before comes once more, as after a reply that was lost."""
        self.put(self.entries[-back].payload)

    def _now(self):
        return BEGAN + 250 * len(self.entries)


def staged(step, name, rank=0, epoch=1):
    return f".staging/epoch_{epoch}_step_{step}_5eed/actor/{name}_{rank}.pt"


def applied(step, epoch=1):
    return WeightsApplied(
        version=StepRef(epoch, step),
        digest=f"sha256:{step:064x}",
        bytes=16,
        verified_at=BEGAN / 1000 + step,
        phases=AppliedPhases(fetch=0.25, pause=0.125),
    )


def publish(tape, step, ranks=(0, 1)):
    tape.add(opened(step, *ranks), "actor", 0)
    for rank in reversed(ranks):
        tape.add(part(step, rank, f"sha256:{step:032x}{rank:032x}"), "actor", rank)
    tape.add(committed(step, "weights"))


def save(tape, step, ranks=(0, 1), epoch=1):
    """A checkpoint with its state dict, from every rank."""
    names = {"state_dict": "model_state_dict", "checkpoint": "training_state"}
    for rank in ranks:
        for kind, name in names.items():
            at = {"kind": kind, "rank": rank, "name": name}
            save_id, path = f"{kind}-{step}-{rank}", staged(step, name, rank, epoch)
            tape.add(started(step, save_id, **at), "actor", rank)
            tape.add(finished(step, save_id, path=path, **at), "actor", rank)
    both = [registration(kind, len(ranks), f"step-{step}") for kind in names]
    for entry in both:
        tape.add(ThreadCountRegistered(step=step, registration=entry))
    tape.add(committed(step, "checkpoint", *both))


def complete():
    """A small run in which nothing goes wrong."""
    tape = Tape("complete")
    tape.add(RunOpened(config_digest="sha256:" + "c" * 64))
    tape.add(TrainerStatusChanged(status="running"))
    for rank in (0, 1):
        tape.add(ExplorerStatusChanged(status="running"), "explorer", rank, epoch=0)
    for step in (1, 2, 3, 4):
        publish(tape, step)
        tape.add(SyncRequested(oldest_version=StepRef(1, step)), "explorer", 1, epoch=0)
        for rank in (0, 1):
            if (step, rank) != (3, 1):
                tape.add(applied(step), "explorer", rank, epoch=0)
        if step % 2 == 0:
            save(tape, step)
    at = {"kind": "state_dict", "name": "final"}
    tape.add(SaveRequested(save_id="final", slot=slot(5, **at)), "actor", 0)
    tape.add(started(5, "final", **at), "actor", 0)
    tape.add(SaveProgressed(save_id="final", slot=slot(5, **at), bytes=4, total=8), "actor", 0)
    tape.add(finished(5, "final", **at), "actor", 0)
    named = Registration(
        registration_id="five", kind="state_dict", expected=1, slots=(slot(5, **at),)
    )
    tape.add(committed(5, "state_dict", named))
    tape.add(TrainerStatusChanged(status="require_sync", step=5))
    for rank in (0, 1):
        tape.add(ExplorerStatusChanged(status="stopped"), "explorer", rank, epoch=0)
    tape.add(RunClosed(reason="finished", step=5))
    return tape


def failures():
    """Everything that can go wrong and be borne."""
    tape = Tape("failures")
    tape.add(committed(1, "state_dict"), "early")  # before any epoch was opened
    tape.add(RunOpened())
    # A failure, its retry, and an attempt that comes too late.
    tape.add(committed(1, "state_dict", registration(expected=1)))
    tape.add(started(1, "first"), "actor", 0)
    tape.add(failed(1, "first"), "actor", 0)
    tape.add(finished(1, "second"), "actor", 0)
    tape.again()
    tape.add(finished(1, "third"), "actor", 0)
    # A gap, and a lease that lapses before its attempt finishes after all.
    tape.add(committed(2, "state_dict", registration(expected=2)))
    tape.add(started(2, "slow", rank=1), "actor", 1, skip=2)
    tape.add(
        LeaseExpired(
            holder=Producer(role="actor", rank=1, node="node-1", incarnation="actor-1-life-1"),
            lease=30.0,
            attempts=(ExpiredAttempt(save_id="slow", slot=slot(2, rank=1)),),
        ),
        "reducer",
    )
    tape.add(finished(2, "slow", rank=1), "actor", 1)
    tape.add(SaveRequested(save_id="queued", slot=slot(2, rank=0)), "actor", 0)
    # Dead letters: of another run, and no event at all.
    tape.put(encode(tape.envelope(RunOpened(), "stranger", run_id="another")))
    tape.put(b"\xc1 not an event")
    # An announcement that somebody published.
    forged = StepFailed(epoch=1, step=9, kind="weights", caused_by="1-0", reason="says who")
    tape.add(forged, "impostor")
    # A version that lacks a part when its deadline comes, and is retried.
    tape.add(opened(3, 0, 1), "actor", 0)
    tape.add(part(3, 0, "sha256:" + "1" * 64), "actor", 0)
    tape.add(committed(3, "weights"))
    tape.add(DeadlineReached(step=3, kind="weights", seconds=60.0), "reducer")
    tape.add(failed(3, "upload", kind="weights", rank=1, name="version"), "actor", 1)
    tape.add(part(3, 0, "sha256:" + "2" * 64), "actor", 0)
    tape.add(part(3, 1, "sha256:" + "3" * 64), "actor", 1)
    # A slow checkpoint that a newer one overtakes.
    tape.add(committed(4, "checkpoint", registration("checkpoint")))
    tape.add(committed(6, "checkpoint", registration("checkpoint")))
    path = staged(6, "training_state")
    tape.add(finished(6, "quick", path=path, kind="checkpoint"), "actor", 0)
    path = staged(4, "training_state")
    tape.add(finished(4, "slow", path=path, kind="checkpoint"), "actor", 0)
    tape.add(
        ConsumerDetached(
            group="eval", stream="announcements", position=f"{BEGAN}-0", pending=2, idle=900.0
        ),
        "reducer",
    )
    tape.add(DeadlineReached(step=2, kind="state_dict", seconds=60.0), "reducer")
    tape.add(RunClosed(reason="failed", step=6, error="OutOfMemoryError: rank 0"))
    return tape


def second_epoch():
    """A run that breaks off at step 4 and goes on from step 2."""
    tape = Tape("second-epoch")
    tape.add(RunOpened())
    for step in (1, 2, 3):
        publish(tape, step)
        save(tape, step)
    tape.add(opened(4, 0, 1), "actor", 0)
    tape.add(part(4, 0), "actor", 0)
    tape.add(committed(4, "checkpoint", registration("checkpoint", 2)))
    tape.epoch = 2
    tape.add(RunResumed(step=2), "second-trainer")
    # What the first epoch still says is not heard; what explorers say is.
    tape.add(part(4, 1), "actor", 1, epoch=1)
    tape.add(TrainerStatusChanged(status="stopped", step=4), epoch=1)
    tape.add(applied(3), "explorer", 0, epoch=1)
    publish(tape, 3)
    save(tape, 3, epoch=2)
    tape.add(applied(3, epoch=2), "explorer", 0, epoch=2)
    tape.add(RunOpened(), "third-trainer", epoch=5)  # epochs may be skipped
    tape.epoch = 5
    tape.add(committed(1, "state_dict", registration(expected=0)), "third-trainer")
    tape.add(RunClosed(reason="interrupted", step=1), "third-trainer")
    return tape


def later_version():
    """As a later version of the contract would write it, read by this one."""
    tape = Tape("later-version")

    def add(event, by, rank=0, **fields):
        raw = to_json(tape.envelope(event, by, rank))
        raw |= {"schema_version": 9, "region": "north", "trace": {"traceparent": "00-1", "x": 1}}
        raw["producer"]["pid"] = 4711
        raw["event"] |= fields
        if "slot" in raw["event"]:
            raw["event"]["slot"]["shard"] = [0, 8]
        tape.put(msgspec.msgpack.encode(raw))

    add(RunOpened(), "trainer", budget={"tokens": 10**9, "until": None})
    add(started(1), "actor", compression="zstd")
    add(RunOpened(), "actor", type="memory-pressed", bytes_free=12)
    add(finished(1), "actor", checksums={"blake3": b"\x00\x01"})
    add(RunOpened(), "trainer", type="budget-spent")
    add(RunOpened(), "newcomer", type="budget-spent")
    add(committed(1, "state_dict", registration()), "trainer", curriculum=["a", ["b"]])
    add(opened(2, 0), "actor", parts_of_rank={"0": 2})
    add(part(2), "actor", quantization="fp8")
    add(committed(2, "weights"), "trainer", curriculum=None)
    add(RunClosed(reason="finished", step=2), "trainer", bill=0.25)
    return tape


def refusals():
    """Weights that are damaged on the way: on one host again and again, and where they are kept."""
    tape = Tape("refusals")
    tape.add(RunOpened())
    for step in (1, 2, 3):
        publish(tape, step)
        tape.add(applied(step), "explorer", 0, epoch=0)
        tape.add(refused(step, rank=1, chunk=step), "explorer", 1, epoch=0)
    publish(tape, 4)
    for rank in (0, 1):
        tape.add(refused(4, rank=0, chunk=0), "explorer", rank, epoch=0)
    tape.again()
    tape.add(refused(4), "explorer", 0, epoch=0)
    tape.add(RunClosed(reason="finished", step=4))
    return tape


def refused(step, **where):
    return VersionRefused(version=StepRef(1, step), reason="it is not what was published", **where)


def rollouts():
    """A run that dispatches, trains, drops and resumes rollouts, and whose processes wait."""
    tape = Tape("rollouts")
    tape.add(RunOpened())
    for rank in (0, 1):
        tape.add(ExplorerStatusChanged(status="running"), "explorer", rank, epoch=0)
    tape.add(RolloutsDispatched(ordinals=((0, 15),), oldest=StepRef(1, 0), fingerprint=TASK_SET))
    waits_for_weights = WaitStarted(
        wait_id="weights-1", what="the weights of step 0", waits_for=("trainer-0",), seconds=5.0
    )
    tape.add(waits_for_weights, "explorer", 1, epoch=0)
    tape.add(waited("step-1", "explorer-0", "explorer-1"))
    tape.add(waited("step-1", "explorer-1", seconds=10.0))
    tape.again()
    tape.add(waited("save", what="the end of model of step 0"), "actor", 0)
    tape.add(
        RolloutsDispatched(
            reissued=(
                ReissuedRollout(ordinal=3, attempt=2, reason="lapsed"),
                ReissuedRollout(ordinal=4, attempt=2, reason="failed"),
            )
        )
    )
    tape.add(WaitEnded(wait_id="weights-1", outcome="over", seconds=9.0), "explorer", 1, epoch=0)
    tape.add(WaitEnded(wait_id="step-1", outcome="over", seconds=12.0))
    tape.add(StepTrained(step=1, trained=((0, 3),), staleness={0: 32}))
    dropped = {"filtered": ((4, 5),), "attempts": ((9, 9),)}
    tape.add(StepTrained(step=2, trained=((6, 8), (10, 10)), dropped=dropped, staleness={1: 32}))
    tape.add(StepTrained(step=3, trained=((10, 11),)))  # one of them was trained before
    # An explorer that is taken for dead, and one that starts again, while they wait.
    for rank in (0, 1):
        wait = waited(f"reward-{rank}", "process 4711", what="the reward right")
        tape.add(wait, "explorer", rank, epoch=0)
    tape.add(
        LeaseExpired(
            holder=Producer(role="explorer", rank=0, node="node-0", incarnation="another"),
            lease=15.0,
        ),
        "reducer",
    )
    tape.add(ExplorerStatusChanged(status="stopped"), "explorer", 1, epoch=0)
    # The next epoch goes on from the checkpoint of step 1, whose ledger it brings.
    tape.epoch = 2
    tape.add(RunResumed(step=1, checkpoint=StepRef(1, 1)), "second-trainer")
    ledger = TrainedLedger(step=1, mark=4, next=16, trained=4, fingerprint=TASK_SET)
    tape.add(LedgerRestored(ledger=ledger, digest=ledger.digest), "second-trainer")
    tape.add(RolloutsDispatched(ordinals=((4, 19),)), "second-trainer")
    tape.add(waited("late", "explorer-0"), epoch=1)  # of an epoch that is over
    tape.add(waited("step-2", "explorer-0"), "second-trainer")
    wait = waited("reward-2", "process 815", what="the reward right")
    tape.add(wait, "explorer", 0, epoch=0)
    tape.add(StepTrained(step=2, trained=((4, 7),)), "second-trainer")
    return tape


def second_contract():
    """Openings, closings, the trainer's end and publications, as version 2 announces them."""
    tape = Tape("second-contract")

    def add(event, by="trainer", rank=0):
        tape.put(encode(structs.replace(tape.envelope(event, by, rank), schema_version=2)))

    add(RunOpened(config='{"steps": 2}'))
    add(TrainerStatusChanged(status="running"))
    add(VersionOpened(step=0, ranks=(1, 0, 1), transport="collective"), "actor")
    add(VersionOpened(step=0, ranks=(0,), transport="collective"), "actor")  # it is open already
    for rank in (0, 1):
        add(part(0, rank, f"sha256:{0:032x}{rank:032x}"), "actor", rank)
    tape.add(committed(0, "weights"))
    add(part(0, 0, f"sha256:{0:064x}"), "actor")  # sent to the group again
    add(opened(1, 0), "actor")
    add(part(1, 0, f"sha256:{1:064x}"), "actor")
    tape.add(committed(1, "weights"))
    add(part(1, 0, f"sha256:{1:064x}"), "actor")  # of a transport that keeps versions
    add(TrainerStatusChanged(status="stopped", step=1))
    add(RunClosed(reason="failed", step=1, error="out of memory"))
    tape.epoch = 2
    add(RunResumed(step=1, config='{"steps": 2}'), "second-trainer")
    add(TrainerStatusChanged(status="stopped", step=2), "second-trainer")
    add(RunClosed(reason="finished", step=2), "second-trainer")
    return tape


def waited(wait_id, *waits_for, what="the rollouts of 0 to 3", seconds=5.0):
    return WaitStarted(
        wait_id=wait_id, what=what, waits_for=waits_for, seconds=seconds, deadline=300.0
    )


TAPES = {
    "rollouts": rollouts,
    "complete": complete,
    "failures": failures,
    "second-epoch": second_epoch,
    "later-version": later_version,
    "refusals": refusals,
    "second-contract": second_contract,
}


def come_to(run_id, entries):
    """What entries fold to: announcements, dead letters, and the state as plain JSON."""
    monitor = Monitor(MonitorState(run_id=run_id))
    announcements, dead = monitor.fold(entries)
    state = json.loads(msgspec.json.encode(msgspec.to_builtins(monitor.state, str_keys=True)))
    for anomaly in state.get("anomalies", ()):
        if anomaly["name"] == "undecodable":
            # The rest may be the wording of a library.
            anomaly["detail"] = anomaly["detail"].partition(": ")[0]
    return (
        [encode(announcement) for announcement in announcements],
        [entry.id for entry, _ in dead],
        state,
    )


def renew(name, entries, run_id):
    """Write what the log comes to now; the log itself, where it is not there."""
    announcements, dead, state = come_to(run_id, entries)
    lines = [line_of("events", entry) for entry in entries]
    lines += [
        line_of("announcements", Entry(f"{BEGAN + number}-0", payload))
        for number, payload in enumerate(announcements)
    ]
    path = FOLDER / f"{name}.jsonl"
    if not path.exists():
        write_lines(path, Header(run_id=run_id, position=entries[-1].id), lines)
    expected = {"state": state, "dead_letters": dead}
    text = json.dumps(expected, indent=2, sort_keys=True) + "\n"
    (FOLDER / f"{name}.expected.json").write_text(text)


def main():
    for name, make in TAPES.items():
        path = FOLDER / f"{name}.jsonl"
        if not path.exists():
            tape = make()
            renew(name, tape.entries, tape.run_id)
        elif "--renew" in sys.argv[1:]:
            header, lines = read_lines(path)
            entries = [line.entry for line in lines if line.stream == "events"]
            renew(name, entries, header.run_id)


if __name__ == "__main__":
    main()
