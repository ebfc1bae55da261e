"""Turns: never two groups at once, first come first served, and everyone who waits is served."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from tests.properties.generated import (
    STRATEGIES,
    Said,
    anything,
    entries,
    examples,
    lapsed,
    new_monitor,
    request,
)
from tests.support.event_histories import failed, finished, slot, started
from trinity_schemas import Process, RunOpened, SaveGranted, SaveRequested

LIMITING = STRATEGIES[1:]
# Two processes on each of two nodes, and one number that is used again after a restart.
PROCESSES = (
    Process(host="north", pid=1, started=1),
    Process(host="north", pid=2, started=1),
    Process(host="south", pid=1, started=1),
    Process(host="south", pid=1, started=2),
)
MOVES = ("ask", "ask", "ask", "start", "finish", "fail", "lapse")


class Move(NamedTuple):
    """Somebody asks for a turn, or whoever is in that place among those under way goes on."""

    what: str
    who: int


moves = st.lists(st.builds(Move, st.sampled_from(MOVES), st.integers(0, 11)), max_size=40)


def group_of(strategy: str, save_id: str, process: Process):
    """Who may save together, in the words of the documentation."""
    return {
        "single_thread": save_id,
        "single_process": process,
        "single_node": process.host,
        "unrestricted": None,
    }[strategy]


class Floor:
    """A run's saves: tells the fold what happens, and writes down who has been granted what."""

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        self.monitor = new_monitor()
        self.waiting: dict[str, Process] = {}  # in the order of asking
        self.running: dict[str, Process] = {}
        self._statements = [Said("opener", RunOpened(save_strategy=strategy), 1)]
        self._requests = 0
        self._fold()

    def move(self, move: Move) -> list[str]:
        """Make a move; returns who was granted a turn by it."""
        if move.what == "ask":
            self._requests += 1
            save_id, process = f"s{self._requests}", PROCESSES[move.who % len(PROCESSES)]
            self.waiting[save_id] = process
            # Each by a sender of its own, so that none of them ends another.
            return self._say(request(save_id, process), by=save_id)
        under_way = [*self.running, *self.waiting]
        if not under_way:
            return []
        return self._go_on(under_way[move.who % len(under_way)], move.what)

    def _go_on(self, save_id: str, what: str) -> list[str]:
        at = {"kind": "checkpoint", "rank": 0, "name": save_id}
        if what == "start":
            if save_id not in self.running:
                return []
            return self._say(started(1, save_id, **at), by=save_id)
        self.running.pop(save_id, None)
        self.waiting.pop(save_id, None)
        if what == "lapse":
            return self._say(lapsed(save_id, 1, **at), by="reducer-0")
        end = finished if what == "finish" else failed
        return self._say(end(1, save_id, **at), by=save_id)

    def end_all(self) -> list[str]:
        """Everyone who has a turn ends it."""
        return [
            granted for save_id in list(self.running) for granted in self._go_on(save_id, "finish")
        ]

    def _say(self, event, by: str) -> list[str]:
        self._statements.append(Said(by, event))
        return self._fold()

    def _fold(self) -> list[str]:
        announcements = self.monitor.apply(*entries(self._statements)[-1])
        granted = [
            announcement.event.save_id
            for announcement in announcements
            if isinstance(announcement.event, SaveGranted)
        ]
        for save_id in granted:
            self.running[save_id] = self.waiting.pop(save_id)
        return granted

    def groups(self, of: dict[str, Process]) -> list:
        """The groups of these saves, each once, in their order."""
        return list(dict.fromkeys(group_of(self.strategy, *save) for save in of.items()))


@examples(150)
@given(st.sampled_from(LIMITING), moves)
def test_two_groups_never_have_a_turn_at_once(strategy, made):
    floor = Floor(strategy)
    for move in made:
        floor.move(move)
        assert len(floor.groups(floor.running)) <= 1
        assert set(floor.monitor.state.turns) == set(floor.running)


@examples(150)
@given(st.sampled_from(LIMITING), moves)
@example("single_node", [Move("ask", 0), Move("ask", 2), Move("ask", 0), Move("fail", 1)])
def test_nobody_waits_while_nobody_saves(strategy, made):
    floor = Floor(strategy)
    for move in made:
        floor.move(move)
        assert floor.running or not floor.waiting
        # Of the group that saves, some wait only because others do.
        assert not floor.waiting or floor.groups(floor.waiting) != floor.groups(floor.running)


@examples(150)
@given(st.sampled_from(LIMITING), moves)
def test_the_turn_passes_to_who_has_waited_longest_and_to_all_of_its_group(strategy, made):
    floor = Floor(strategy)
    queue: list = []  # groups in the order in which they came to wait
    for move in made:
        was_running = floor.groups(floor.running)
        granted = floor.move(move)
        still = floor.groups(floor.waiting)
        if granted and was_running and floor.groups(floor.running) == was_running:
            assert still == []  # joined those of its group, nobody else waiting
        elif granted and queue:
            assert floor.groups(floor.running) == queue[:1]
        assert not granted or floor.groups(floor.running)[0] not in still
        queue = [group for group in queue if group in still]
        queue += [group for group in still if group not in queue]


@examples(150)
@given(st.sampled_from(LIMITING), moves, st.integers(0, 3))
def test_who_waits_is_served_after_those_before_it_however_many_come(strategy, made, newcomer):
    floor = Floor(strategy)
    for move in made:
        floor.move(move)
    waited, rounds = set(floor.waiting), len(floor.groups(floor.waiting))
    for _ in range(rounds):
        assert waited & set(floor.waiting)
        # The group that has the turn asks for more of it, again and again.
        floor.move(Move("ask", newcomer))
        for process in list(floor.running.values())[:1]:
            floor.move(Move("ask", PROCESSES.index(process)))
        floor.end_all()
    assert not waited & set(floor.waiting)


@examples(50)
@given(moves)
def test_without_a_limit_every_request_is_granted_at_once(made):
    floor = Floor("unrestricted")
    for move in made:
        floor.move(move)
        assert not floor.waiting


@examples(150)
@given(anything())
def test_turns_stay_sound_whatever_anybody_says(history):
    monitor = new_monitor()
    for entry in history:
        monitor.apply(*entry)
        state = monitor.state
        queued = [save_id for waiting in state.queue.values() for save_id in waiting]
        assert len(set(state.turns.values())) <= 1 or state.strategy == "unrestricted"
        assert state.turns or not state.queue
        assert all(state.queue.values())
        assert len(set(queued)) == len(queued)
        assert not set(queued) & set(state.turns)
        assert set(queued) | set(state.turns) <= set(state.attempts)


def test_an_end_that_was_lost_does_not_keep_the_turn_for_ever():
    monitor = new_monitor()
    first, other = PROCESSES[0], PROCESSES[2]
    statements = [
        Said("opener", RunOpened(save_strategy="single_node"), 1),
        Said("actor-0", request("s1", first)),
        Said("actor-1", request("s2", other)),
    ]
    # Without the end of its first save, the sender asks for its next of the same name.
    again = SaveRequested(save_id="s3", slot=slot(2, "checkpoint", 0, "s1"), process=first)
    statements.append(Said("actor-0", again))
    granted = [
        answer.event.save_id
        for entry in entries(statements)
        for answer in monitor.apply(*entry)
        if isinstance(answer.event, SaveGranted)
    ]
    assert granted == ["s1", "s2"]
