"""Bars of a window are the spans that a builder finds in the whole log."""

from __future__ import annotations

import pytest

from tests.support.dashboards import SMALL
from trinity_events.analysis.spans import MILLISECOND, SpanBuilder
from trinity_events.core import MonitorState
from trinity_events.core.fold import Monitor
from trinity_events.dashboard.bars import build_bars
from trinity_events.dashboard.simulated_run import simulated_run
from trinity_events.log import position
from trinity_events.replay import fold_each

ENTRIES = list(simulated_run(SMALL))
END = position(ENTRIES[-1].id)[0]
# Steps end with reports of phases, which are in no span: these two entries are in spans.
PUBLISHED = [number for number, entry in enumerate(ENTRIES) if b"part-published" in entry.payload]
MIDDLE = PUBLISHED[len(PUBLISHED) // 2]
LAST = max(number for number, entry in enumerate(ENTRIES) if b"weights-applied" in entry.payload)


def state_after(number):
    monitor = Monitor(MonitorState(run_id=SMALL.run_id))
    monitor.fold(ENTRIES[:number])
    return monitor.state


def bars_after(number):
    state = state_after(number)
    begin = position(ENTRIES[number].id)[0]
    return list(build_bars(state, fold_each(state, ENTRIES[number:]), begin, END))


@pytest.fixture(scope="module")
def spans():
    builder, spans = SpanBuilder(), []
    for folded in fold_each(state_after(0), ENTRIES):
        if folded.envelope is not None:
            spans += builder.add(folded.entry.id, folded.envelope)
    return [*spans, *builder.finish(END * MILLISECOND, "under way")]


@pytest.mark.parametrize("number", [0, 37, MIDDLE, LAST])
def test_a_window_has_the_spans_of_the_log_that_end_in_it(spans, number):
    first = position(ENTRIES[number].id)
    ended = {
        (span.process, span.end // MILLISECOND, span.entry)
        for span in spans
        if not span.is_open and position(span.entry) >= first and span.category != "fetch"
    }
    assert ended
    assert ended <= {(bar.lane, bar.end, bar.entry) for bar in bars_after(number)}


def test_bars_of_a_later_window_begin_where_those_of_the_whole_log_do():
    whole = {(bar.lane, bar.label, bar.end, bar.outcome): bar.begin for bar in bars_after(0)}
    begun_before = 0
    for bar in bars_after(MIDDLE):
        if bar.label.startswith("step ") and bar.outcome == "trained":
            continue  # the step before it is in no state
        assert whole[bar.lane, bar.label, bar.end, bar.outcome] == bar.begin
        begun_before += bar.begin < position(ENTRIES[MIDDLE].id)[0]
    assert begun_before


def test_each_bar_of_a_save_shows_its_outcome_and_its_bytes():
    saves = [bar for bar in bars_after(0) if bar.label.startswith(("saves ", "publishes "))]
    assert {bar.outcome for bar in saves} <= {"finished", "published", "failed", "under way"}
    assert all("bytes" in bar.detail for bar in saves if bar.outcome in ("finished", "published"))
    assert {"finished", "published"} <= {bar.outcome for bar in saves}
