"""Pauses of engines in the state: a pause ends with its event, its explorer, or its lease."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.event_histories import History
from trinity_events.analysis.causes import LiveFacts, find_causes
from trinity_events.analysis.explain import explain
from trinity_events.core import decode_state, encode_state
from trinity_events.core.pauses import format_pause, has_lapsed, open_pauses
from trinity_schemas import (
    ExplorerStatusChanged,
    GenerationPaused,
    GenerationResumed,
    RunClosed,
    StepRef,
)

VERSION = StepRef(1, 4)
PAUSED = GenerationPaused(version=VERSION, mode="abort", lease=60.0, in_flight=12)
RUNNING = ExplorerStatusChanged(status="running")


def fold(history):
    return history.fold()[0].state


def test_a_pause_lasts_from_its_event_to_the_one_that_ends_it():
    history = History()
    at = int(history.add(PAUSED, by="explorer", rank=2).partition("-")[0])
    state = fold(history)
    [(name, pause)] = open_pauses(state)
    assert (name, pause.since, pause.version, pause.mode) == ("explorer-2", at, VERSION, "abort")
    assert (pause.in_flight, pause.lease) == (12, 60.0)
    assert decode_state(encode_state(state)) == state
    resumed = GenerationResumed(version=VERSION, serves=VERSION, aborted=9, seconds=0.1)
    history.add(resumed, by="explorer", rank=2)
    history.add(PAUSED, by="explorer", rank=2)
    history.add(resumed, by="explorer", rank=2)
    state = fold(history)
    assert not open_pauses(state)
    assert state.explorers["explorer-2"].aborted == 18


@pytest.mark.parametrize(
    ("event", "incarnation", "remains"),
    [
        (RUNNING, None, True),
        (RUNNING, "another start", False),
        (ExplorerStatusChanged(status="stopped"), None, False),
    ],
)
def test_no_pause_outlives_its_explorer(event, incarnation, remains):
    history = History()
    history.add(PAUSED, by="explorer")
    history.add(event, by="explorer")
    if incarnation is not None:
        entry_id, envelope = history.entries[-1]
        producer = replace(envelope.producer, incarnation=incarnation)
        history.entries[-1] = entry_id, replace(envelope, producer=producer, sequence=1)
    assert bool(open_pauses(fold(history))) == remains


def test_no_pause_is_open_in_a_run_that_is_closed():
    history = History()
    history.add(PAUSED, by="explorer")
    history.add(RunClosed(reason="failed"))
    assert not open_pauses(fold(history))


def test_explain_and_the_causes_have_a_pause_and_the_end_of_its_lease():
    history = History()
    at = int(history.add(PAUSED, by="explorer").partition("-")[0])
    state = fold(history)
    [paused] = open_pauses(state)
    sentence = format_pause(paused, at + 9_000)
    assert "explorer-0" in sentence and "step 4" in sentence and "9.0 s" in sentence
    assert "abort" in sentence and "12 requests" in sentence and "51 s" in sentence
    assert sentence in explain(state, 4, now=at + 9_000)
    assert sentence not in explain(state, 5, now=at + 9_000)
    [cause] = find_causes(state, LiveFacts(now=at + 9_000))
    assert (cause.reason, cause.process, cause.step) == ("paused", "explorer-0", 4)
    assert cause.sentence == sentence
    assert not has_lapsed(paused.pause, at + 60_000)
    assert has_lapsed(paused.pause, at + 60_001)
    assert "its lease of 60 s is over" in format_pause(paused, at + 60_001)
