"""The index of a log stays small however long the log is."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.dashboards import SMALL
from trinity_events.core import MonitorState, encode_state
from trinity_events.core.fold import Monitor
from trinity_events.dashboard import activity, history, series, states
from trinity_events.dashboard.activity import Activity
from trinity_events.dashboard.history import History
from trinity_events.dashboard.series import Series
from trinity_events.dashboard.simulated_run import Plan, simulated_run
from trinity_events.dashboard.spans import Span, merged
from trinity_events.dashboard.states import KeptStates
from trinity_events.log import position
from trinity_events.replay import fold

ENTRIES = list(simulated_run(SMALL))


def history_of(entries):
    begin, end = (position(one.id)[0] for one in (entries[0], entries[-1]))
    found = History(MonitorState(run_id=SMALL.run_id), begin, end)
    found.feed(entries)
    return found


@pytest.mark.parametrize("bound", ["number", "bytes"])
def test_kept_states_are_thinned_out_and_stay_those_of_the_fold(monkeypatch, bound):
    monkeypatch.setattr(states, "SPACING", 4)
    monkeypatch.setattr(states, "MOST", 16 if bound == "number" else 10**6)
    monkeypatch.setattr(states, "MOST_BYTES", 10**9 if bound == "number" else 30_000)
    kept = KeptStates()
    monitor = Monitor(MonitorState(run_id=SMALL.run_id))
    kept.keep(0, monitor.state)
    for number, entry in enumerate(ENTRIES, 1):
        fold(monitor, [entry])
        if kept.wants(number):
            kept.keep(number, monitor.state)
    assert kept.count <= 17
    assert kept.nbytes <= 10**9 if bound == "number" else kept.nbytes <= 30_000
    for number in (0, 1, 77, len(ENTRIES)):
        found = kept.before(number)
        assert number - kept.spacing < found.number <= number
        other = Monitor(MonitorState(run_id=SMALL.run_id))
        fold(other, ENTRIES[: found.number])
        assert encode_state(found.decode()) == encode_state(other.state)


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 3)), max_size=200))
def test_counts_add_up_however_often_buckets_widen(events):
    counts = Activity(0, 10)
    for at, lane in sorted(events):
        counts.add(lane, 2, at)
    for lane in range(4):
        found = sum(cell.number for cell in counts.cells(lane, 0, 50_000))
        assert found == sum(1 for _, of in events if of == lane)
    assert max((at for at, _ in events), default=0) // counts.width < activity.BUCKETS


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5000))
def test_a_series_keeps_few_points_whose_mean_is_that_of_all_of_a_whole_stride(values):
    found = Series()
    for step, value in enumerate(values):
        found.add(1, step, value)
    points = found.points()
    assert 0 < len(points) <= series.POINTS + 1
    assert [step for _, step, _ in points] == sorted({step for _, step, _ in points})
    assert points[-1][1] == len(values) - 1
    assert min(values) - 1e-6 <= min(value for *_, value in points)
    assert max(value for *_, value in points) <= max(values) + 1e-6


def test_not_a_number_is_left_out_of_a_series():
    found = Series()
    for value in (1.0, float("nan"), float("inf"), 2.0):
        found.add(1, 1, value)
    assert [value for *_, value in found.points()] == [1.0, 2.0]


def test_producers_beyond_the_lanes_share_the_last_one(monkeypatch):
    monkeypatch.setattr(history, "LANES", 6)
    found = history_of(ENTRIES)
    assert [lane.name for lane in found.lanes][-1] == "others"
    assert len(found.lanes) == 6
    counted = sum(
        cell.number
        for lane in range(len(found.lanes))
        for cell in found.activity.cells(lane, found.begin, found.last)
    )
    assert counted == len(ENTRIES) + found.state.announced


def test_a_long_run_takes_bounded_memory():
    plan = Plan(run_id="long", ranks=4, explorers=4, steps=3000, seconds=2, faults=False)
    entries = list(islice(simulated_run(plan), 30_000))
    found = History(MonitorState(run_id="long"), position(entries[0].id)[0], 0)
    found.feed(entries)
    assert found.states.count <= states.MOST
    assert len(found.blocks.all) == 30
    assert len(found.figures.versions) <= series.VERSIONS
    assert all(len(one.points()) <= series.POINTS + 1 for one in found.figures.metrics.values())


def test_short_spans_nearer_than_a_pixel_become_one_and_none_is_lost():
    spans = [Span("a-0", at, at, 3, "x", f"{at}-0") for at in range(0, 1000, 5)]
    spans += [Span("a-0", 100, 900, 3, "long", "900-0")]
    found = merged(spans, 50)
    assert len(found) < 60
    assert sum(one.count for one in found) == 201
    assert any(one.label == "long" and one.end - one.begin == 800 for one in found)
