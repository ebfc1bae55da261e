"""The fold keeps its invariants over all histories: any order, any loss, anything said twice."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.generated import (
    Said,
    Scripts,
    anything,
    entries,
    examples,
    new_monitor,
    repeated,
    scripts,
)
from tests.properties.oracle import Oracle, complete
from tests.support.event_histories import RUN, committed, failed, finished, registration, started
from trinity_events.core import Monitor, MonitorState, decode_state, encode_state
from trinity_events.core.announcements import is_current, newest_subjects, subject
from trinity_events.core.limits import KEPT_STEPS_AT_MOST
from trinity_events.log import Entry
from trinity_schemas import (
    EnvelopeReader,
    RunOpened,
    RunResumed,
    StepReady,
    StepSuperseded,
    TrainerStatusChanged,
    decode_envelope,
    encode,
)


def announced(monitor, written):
    return [announcement.event for entry in written for announcement in monitor.apply(*entry)]


def ready(events):
    return [
        (event.epoch, event.step, event.kind) for event in events if isinstance(event, StepReady)
    ]


def settled(events):
    """Ready or superseded: either way it was complete, or given up."""
    superseded = {(o.epoch, o.step, o.kind) for o in events if isinstance(o, StepSuperseded)}
    return superseded | set(ready(events))


@examples(150)
@given(anything())
def test_nothing_is_announced_ready_twice(history):
    twice = [
        subject_key
        for subject_key, count in Counter(ready(announced(new_monitor(), history))).items()
        if count > 1
    ]
    assert twice == []


@examples(150)
@given(anything(most=25))
def test_ready_is_announced_when_it_is_proven_and_at_no_other_entry(history):
    monitor, oracle = new_monitor(), Oracle()
    for entry in history:
        expected = oracle.feed(entry)
        events = [announcement.event for announcement in monitor.apply(*entry)]
        assert set(ready(events)) == expected, entry
        pointers = {kind: (p.at.epoch, p.at.step) for kind, p in monitor.state.ready.items()}
        assert pointers == oracle.pointers


@examples(150)
@given(anything())
def test_pointers_never_go_back_within_an_epoch_nor_to_an_older_one(history):
    monitor = new_monitor()
    for entry_id, envelope in history:
        before, epoch = dict(monitor.state.ready), monitor.state.epoch
        monitor.apply(entry_id, envelope)
        assert monitor.state.epoch >= epoch
        for kind, pointer in before.items():
            assert monitor.state.ready[kind].at >= pointer.at


@examples(150)
@given(st.data())
def test_what_is_said_twice_changes_nothing_but_a_count(data):
    once, twice = data.draw(anything(most=20).flatmap(repeated))
    live, again = new_monitor(), new_monitor()
    assert announced(live, once) == announced(again, twice)
    copies = len(twice) - len(once)
    counts = again.state.anomaly_counts
    assert counts.pop("duplicate") == copies + live.state.anomaly_counts.pop("duplicate", 0)
    assert bare(again.state) == bare(live.state)


@examples(100)
@given(scripts(), st.data())
def test_an_epoch_is_opened_once(script, data):
    # No run of ours opens one twice, but anybody may write that it was.
    alone = script.in_turn()
    opening = data.draw(st.sampled_from([RunOpened(), RunResumed(step=1), RunResumed(step=2)]))
    at = data.draw(st.integers(0, len(alone)))
    disturbed = [*alone[:at], Said("intruder", opening), *alone[at:]]
    outcomes = []
    for statements in (alone, disturbed):
        monitor = new_monitor()
        announcements = announced(monitor, entries(statements))
        pointers = {kind: pointer.at for kind, pointer in monitor.state.ready.items()}
        outcomes.append((ready(announcements), pointers, set(monitor.state.steps)))
    assert outcomes[0] == outcomes[1]


def bare(state: MonitorState) -> dict:
    """The state without what tells how often and up to where it was told."""
    plain = msgspec.to_builtins(state)
    for name in ("entries", "position", "anomalies"):
        plain.pop(name, None)
    return plain


@examples(150)
@given(scripts(), st.data())
def test_the_order_of_independent_producers_decides_nothing(script, data):
    other = data.draw(st.permutations(script.turns))
    outcomes = []
    for written in (script.entries(), script._replace(turns=other).entries()):
        monitor = new_monitor()
        events = announced(monitor, written)
        assert settled(events) == complete(written)
        outcomes.append((settled(events), {k: p.at for k, p in monitor.state.ready.items()}))
    assert outcomes[0] == outcomes[1]


@examples(150)
@given(scripts(), st.data())
def test_orders_that_mix_up_the_workers_decide_nothing_either(script, data):
    # Each worker's event as from a worker of its own: a start may follow its finish.
    trainer, *workers = script.scripts
    alone = [[statement._replace(by=f"w-{n}")] for n, statement in enumerate(chain(*workers))]
    turns = [number for number, sequence in enumerate([trainer, *alone]) for _ in sequence]
    written = Scripts([trainer, *alone], data.draw(st.permutations(turns))).entries()
    assert settled(announced(new_monitor(), written)) == complete(written)
    assert complete(written) == complete(script.entries())


@examples(150)
@given(anything(), st.integers(0, 40))
def test_a_replay_to_any_entry_gives_the_state_that_was_live_there(history, cut):
    live, states = new_monitor(), [encode_state(new_monitor().state)]
    for entry in history:
        live.apply(*entry)
        states.append(encode_state(live.state))
    replayed = new_monitor()
    announced(replayed, history[:cut])
    assert encode_state(replayed.state) == states[min(cut, len(history))]


@examples(150)
@given(anything(), st.integers(0, 40))
def test_a_snapshot_taken_at_any_entry_goes_on_as_if_it_had_not_been(history, cut):
    live = new_monitor()
    uninterrupted = announced(live, history)
    first = new_monitor()
    begun = announced(first, history[:cut])
    second = Monitor(decode_state(encode_state(first.state)))
    assert begun + announced(second, history[cut:]) == uninterrupted
    assert encode_state(second.state) == encode_state(live.state)


@examples(100)
@given(anything(most=25))
def test_announcements_are_numbered_caused_and_readable(history):
    monitor, made = new_monitor(), []
    for entry in history:
        for announcement in monitor.apply(*entry):
            made.append(announcement)
            assert announcement.sequence == len(made)
            assert getattr(announcement.event, "caused_by", entry[0]) == entry[0]
            assert decode_envelope(encode(announcement)) == announcement
    # What stands after all of them is named in one go as it would be one by one.
    stood = {
        subject(announcement): announcement
        for announcement in made
        if is_current(announcement, monitor.state)
    }
    named = [
        (name, announcement)
        for name, announcement in zip(newest_subjects(made, monitor.state), made, strict=True)
        if name
    ]
    assert len(named) == len(stood)
    assert dict(named) == stood


@st.composite
def mutated(draw, history):
    """The history's bytes, some of them spoiled in transit."""
    spoiled = []
    for entry_id, envelope in history:
        payload = bytearray(encode(envelope))
        for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
            at = draw(st.integers(0, len(payload) - 1))
            payload[at] = draw(st.integers(0, 255))
        spoiled.append(Entry(entry_id, bytes(payload)))
    return spoiled


@examples(150)
@given(anything(most=12).flatmap(mutated))
def test_no_spoiled_entry_stops_the_fold(spoiled):
    monitor = Monitor(MonitorState(run_id=RUN))
    announcements, dead = monitor.fold(spoiled)
    assert monitor.state.position == spoiled[-1].id if spoiled else monitor.state.entries == 0
    assert monitor.state.entries == len(spoiled)
    assert monitor.state.dead_letters == len(dead)
    decode_state(encode_state(monitor.state))
    # Who recognises senders by their bytes sees the same.
    other = Monitor(MonitorState(run_id=RUN))
    assert other.fold(spoiled, EnvelopeReader().decode) == (announcements, dead)
    assert other.state == monitor.state


@examples(150)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=10))
def test_noise_is_set_aside_whole(payloads):
    monitor = Monitor(MonitorState(run_id=RUN))
    spoiled = [Entry(f"{n + 1}-0", payload) for n, payload in enumerate(payloads)]
    announcements, dead = monitor.fold(spoiled)
    assert (announcements, len(dead)) == ([], len(spoiled))


def _a_step(way: int, step: int) -> list[Said]:
    """A step that goes one way for good: saved, failed, silent, unregistered, a lone save..."""
    by, registered = "actor-0", registration("checkpoint")
    return [
        [
            Said(by, finished(step, f"a{step}", kind="checkpoint")),
            Said("trainer", committed(step, "checkpoint", registered)),
        ],
        [
            Said(by, started(step, f"a{step}", kind="checkpoint")),
            Said(by, failed(step, f"a{step}", kind="checkpoint")),
        ],
        [Said("trainer", committed(step, "checkpoint", registered))],
        [Said("trainer", committed(step, "state_dict"))],
        [Said(f"actor-{step}", finished(step, f"a{step}", rank=step))],
        [Said("opener", RunOpened(), 1)],
        [Said("opener", RunResumed(step=step), 1)],
        [Said("trainer", TrainerStatusChanged(status="running", step=step), -1)],
    ][way]


@examples(25)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6))
def test_the_state_does_not_outgrow_its_bound_whatever_goes_on_for_ever(ways):
    monitor = new_monitor()
    sizes = []
    for turn in range(4):
        statements = [
            statement
            for step in range(turn * 600, turn * 600 + 600)
            for statement in _a_step(ways[step % len(ways)], step)
        ]
        for _, envelope in entries(statements, first=1000 * (turn + 1)):
            epoch = monitor.state.epoch + (envelope.epoch > monitor.state.epoch)
            monitor.apply(f"{1000 + monitor.state.entries}-0", envelope)
            assert monitor.state.epoch <= epoch
        sizes.append(len(monitor.state.steps))
    assert max(sizes) <= KEPT_STEPS_AT_MOST
