"""Our pointers beside those of Trinity-RFT's monitor, on histories that it takes without error.

Its rules are re-stated here as a small model: it counts the saves of a step, registered less
finished, and moves a pointer when a step was asked for and its count is zero.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from tests.properties.generated import examples
from tests.support.event_histories import History
from trinity_events.core import Monitor, MonitorState
from trinity_events.testing import Pipeline
from trinity_schemas import (
    Registration,
    SaveFinished,
    Slot,
    StepCommitted,
    ThreadCountRegistered,
)


class Failed(Exception):
    """The original raises here, in the middle of somebody's save."""


class Original:
    """What the original's monitor does with what it is told."""

    def __init__(self) -> None:
        self.unfinished = {"state_dict": defaultdict(int), "checkpoint": defaultdict(int)}
        self.monitored = {"state_dict": set(), "checkpoint": set()}
        self.latest = {"state_dict": 0, "checkpoint": 0}

    def register(self, step: int, counts: dict[str, int]) -> None:
        for kind, count in counts.items():
            self.unfinished[kind][step] += count

    def monitor_step(self, step: int, kind: str) -> None:
        self.monitored[kind].add(step)
        if kind == "state_dict" and self._done(step, "state_dict"):
            self._update("state_dict", step)
        if kind == "checkpoint" and self._done(step, "state_dict", "checkpoint"):
            self._update_checkpoint(step)

    def finished(self, step: int, kind: str) -> None:
        self.unfinished[kind][step] -= 1
        checkpoints = self.monitored["checkpoint"]
        if (
            kind == "state_dict"
            and step in self.monitored["state_dict"] | checkpoints
            and self._done(step, "state_dict")
        ):
            self._update("state_dict", step)
        if step in checkpoints and self._done(step, "state_dict", "checkpoint"):
            self._update_checkpoint(step)

    def _done(self, step: int, *kinds: str) -> bool:
        return all(self.unfinished[kind].get(step, 0) == 0 for kind in kinds)

    def _update_checkpoint(self, step: int) -> None:
        self._update("checkpoint", step)
        if step in self.unfinished["state_dict"]:
            self._update("state_dict", step)

    def _update(self, kind: str, step: int) -> None:
        if step < self.latest[kind]:
            raise Failed(f"{kind} {step} after {self.latest[kind]}")
        self.latest[kind] = step


class Save(NamedTuple):
    """One save that was dispatched and will be told of when it is finished."""

    step: int
    kind: str
    number: int


class Commit(NamedTuple):
    """The trainer registers how many saves to expect, and asks for the step."""

    step: int
    kind: str
    counts: dict[str, int]
    number: int


@st.composite
def histories(draw) -> list[Save | Commit]:
    """A trainer that saves state dicts and checkpoints, and saves that finish when they may."""
    sequence: list[Save | Commit] = []
    under_way: list[Save] = []
    number = 0
    for step in range(1, draw(st.integers(1, 5)) + 1):
        for kind in draw(st.sampled_from([["state_dict"], ["checkpoint"], _BOTH, []])):
            counts = {"state_dict": draw(st.integers(0, 2))}
            if kind == "checkpoint":
                counts["checkpoint"] = draw(st.integers(0, 2))
            for saved_kind, count in counts.items():
                for _ in range(count):
                    number += 1
                    under_way.append(Save(step, saved_kind, number))
            sequence += _some_of(draw, under_way)  # faster than the trainer's own word
            sequence.append(Commit(step, kind, counts, number))
            sequence += _some_of(draw, under_way)
    return sequence + draw(st.permutations(under_way))


_BOTH = ["state_dict", "checkpoint"]


def _some_of(draw, under_way: list[Save]) -> list[Save]:
    if not under_way:
        return []
    ended = draw(st.lists(st.sampled_from(under_way), unique=True, max_size=3))
    for save in ended:
        under_way.remove(save)
    return ended


def tell_original(original: Original, action: Save | Commit) -> None:
    if isinstance(action, Save):
        original.finished(action.step, action.kind)
    else:
        original.register(action.step, action.counts)
        original.monitor_step(action.step, action.kind)


def events(action: Save | Commit):
    """The same, as our trainer and workers say it."""
    if isinstance(action, Save):
        slot = Slot(
            step=action.step, kind=action.kind, role="actor", rank=0, name=f"n{action.number}"
        )
        return [SaveFinished(save_id=f"s{action.number}", slot=slot, bytes=8)]
    registrations = tuple(
        Registration(
            registration_id=f"r{action.number}-{action.kind}-{kind}", kind=kind, expected=count
        )
        for kind, count in action.counts.items()
    )
    return [
        *(ThreadCountRegistered(step=action.step, registration=each) for each in registrations),
        StepCommitted(step=action.step, kind=action.kind, registrations=registrations),
    ]


def taken_without_error(history: list[Save | Commit]) -> list[tuple[Save | Commit, dict[str, int]]]:
    """The history up to where the original raises, with its pointers after each of its steps."""
    original, outcomes = Original(), []
    for action in history:
        try:
            tell_original(original, action)
        except Failed:
            break
        outcomes.append((action, dict(original.latest)))
    return outcomes


def pointers(state: MonitorState) -> dict[str, int]:
    steps = {kind: pointer.at.step for kind, pointer in state.ready.items()}
    return {kind: steps.get(kind, 0) for kind in ("state_dict", "checkpoint")}


def in_a_checkpoint_under_way(state: MonitorState, step: int) -> bool:
    """Whether the step's state dict belongs to a checkpoint that is not complete.

    The original names such a state dict at once. Ours does so with its checkpoint: the two may
    share a folder, which gets its name when all of it is there.
    """
    kinds = state.steps[step].kinds
    checkpoint = kinds.get("checkpoint")
    alone = kinds["state_dict"].committed_at is not None
    return (
        checkpoint is not None
        and checkpoint.committed_at is not None
        and checkpoint.outcome is None
        and not alone
    )


@examples(300)
@given(histories())
def test_our_pointers_are_the_originals_at_every_event(history):
    monitor, log = Monitor(MonitorState(run_id="history")), History()
    monitor.apply(*log.entries[0])
    for action, expected in taken_without_error(history):
        for event in events(action):
            log.add(event, by="actor" if isinstance(action, Save) else "trainer")
            monitor.apply(*log.entries[-1])
        ours = pointers(monitor.state)
        assert ours["checkpoint"] == expected["checkpoint"]
        if ours["state_dict"] != expected["state_dict"]:
            assert ours["state_dict"] < expected["state_dict"]
            assert in_a_checkpoint_under_way(monitor.state, expected["state_dict"])


@examples(150)
@given(histories())
def test_our_pointers_are_the_originals_when_all_saves_have_ended(history):
    outcomes = taken_without_error(history)
    log = History()
    for action, _ in outcomes:
        for event in events(action):
            log.add(event, by="actor" if isinstance(action, Save) else "trainer")
    if len(outcomes) == len(history) and history:
        assert pointers(log.fold()[0].state) == outcomes[-1][1]


def test_the_histories_compared_are_not_all_trivial():
    # The comparison would be worth nothing if the model refused, or ignored, most of what it got.
    whole, moved = [], set()

    @examples(80)
    @given(histories())
    def look(history):
        outcomes = taken_without_error(history)
        whole.append(len(outcomes) == len(history))
        moved.update(tuple(latest.values()) for _, latest in outcomes)

    look()
    assert sum(whole) > len(whole) / 4
    assert len(moved) > 15


async def test_the_iteration_files_hold_what_the_original_writes(tmp_path):
    # Saves that overlap, and one that is told of before the trainer's own word.
    history = [
        Commit(1, "state_dict", {"state_dict": 1}, 1),
        Save(2, "checkpoint", 3),
        Save(1, "state_dict", 1),
        Commit(2, "checkpoint", {"state_dict": 1, "checkpoint": 1}, 3),
        Save(2, "state_dict", 2),
        Commit(3, "state_dict", {"state_dict": 0}, 4),
    ]
    expected = taken_without_error(history)[-1][1]
    assert expected == {"state_dict": 3, "checkpoint": 2}
    for step in expected.values():  # where the original's workers write
        (tmp_path / "run" / f"global_step_{step}").mkdir(parents=True)
        (tmp_path / "run" / f"global_step_{step}" / "model.pt").touch()
    async with Pipeline("test", checkpoint_folder=tmp_path / "run") as run:
        trainer, actor = run.publisher("trainer"), run.publisher("actor")
        for action in history:
            for event in events(action):
                await (actor if isinstance(action, Save) else trainer).publish(event)
        await run.settled()
    names = {
        "state_dict": "latest_state_dict_iteration.txt",
        "checkpoint": "latest_checkpointed_iteration.txt",
    }
    written = {kind: int((tmp_path / "run" / name).read_text()) for kind, name in names.items()}
    assert written == expected
