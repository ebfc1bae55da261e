"""The index of a log stays small however long the log is."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.dashboards import SMALL
from trinity_events.core import MonitorState, encode_state
from trinity_events.core.fold import Monitor
from trinity_events.dashboard import activity, series
from trinity_events.dashboard.activity import Activity
from trinity_events.dashboard.bars import Bar, merge_bars
from trinity_events.dashboard.history import History
from trinity_events.dashboard.series import Series
from trinity_events.dashboard.simulated_run import Plan, simulated_run
from trinity_events.dashboard.states import CompressedStates, StateLimits
from trinity_events.log import position

ENTRIES = list(simulated_run(SMALL))


def history_of(entries, **limits):
    begin, end = (position(entry.id)[0] for entry in (entries[0], entries[-1]))
    history = History(MonitorState(run_id=SMALL.run_id), begin, end, **limits)
    history.feed(entries)
    return history


@pytest.mark.parametrize("bound", ["number", "bytes"])
def test_kept_states_are_thinned_out_and_stay_those_of_the_fold(bound):
    most, most_bytes = (16, 10**9) if bound == "number" else (10**6, 30_000)
    stored = CompressedStates(StateLimits(spacing=4, most=most, most_bytes=most_bytes))
    monitor = Monitor(MonitorState(run_id=SMALL.run_id))
    stored.add(0, monitor.state)
    for number, entry in enumerate(ENTRIES, 1):
        monitor.fold([entry])
        if stored.is_due(number):
            stored.add(number, monitor.state)
    assert stored.count <= most + 1
    assert stored.nbytes <= most_bytes
    assert 1 < stored.count < len(ENTRIES) // 4
    for number in (0, 1, 77, len(ENTRIES)):
        nearest = stored.before(number)
        assert number - stored.spacing < nearest.number <= number
        other = Monitor(MonitorState(run_id=SMALL.run_id))
        other.fold(ENTRIES[: nearest.number])
        assert encode_state(nearest.decode()) == encode_state(other.state)


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 3)), max_size=200))
def test_counts_add_up_however_often_buckets_widen(events):
    counts = Activity(0, 10)
    for at, lane in sorted(events):
        counts.add(lane, 2, at)
    for lane in range(4):
        counted = sum(cell.number for cell in counts.cells(lane, 0, 50_000))
        assert counted == sum(1 for _, of in events if of == lane)
    assert max((at for at, _ in events), default=0) // counts.width < activity.BUCKETS


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5000))
def test_a_series_keeps_few_points_whose_mean_is_that_of_all_of_a_whole_stride(values):
    metric_series = Series()
    for step, value in enumerate(values):
        metric_series.add(1, step, value)
    points = metric_series.points()
    assert 0 < len(points) <= series.POINTS + 1
    assert [step for _, step, _ in points] == sorted({step for _, step, _ in points})
    assert points[-1][1] == len(values) - 1
    assert min(values) - 1e-6 <= min(value for *_, value in points)
    assert max(value for *_, value in points) <= max(values) + 1e-6


def test_not_a_number_is_left_out_of_a_series():
    metric_series = Series()
    for value in (1.0, float("nan"), float("inf"), 2.0):
        metric_series.add(1, 1, value)
    assert [value for *_, value in metric_series.points()] == [1.0, 2.0]


def test_producers_beyond_the_lanes_share_the_last_one():
    run_history = history_of(ENTRIES, lanes=6)
    assert [lane.name for lane in run_history.lanes][-1] == "others"
    assert len(run_history.lanes) == 6
    counted = sum(
        cell.number
        for lane in range(len(run_history.lanes))
        for cell in run_history.activity.cells(lane, run_history.begin, run_history.last)
    )
    assert counted == len(ENTRIES) + run_history.state.announced


def test_a_long_run_takes_bounded_memory():
    plan = Plan(run_id="long", ranks=4, explorers=4, steps=3000, seconds=2, faults=False)
    entries = list(islice(simulated_run(plan), 30_000))
    history = History(MonitorState(run_id="long"), position(entries[0].id)[0], 0)
    history.feed(entries)
    assert history.states.count <= StateLimits().most
    assert len(history.blocks.all) == 30
    assert len(history.figures.versions) <= series.VERSIONS
    assert all(len(line.points()) <= series.POINTS + 1 for line in history.figures.metrics.values())


def test_short_bars_nearer_than_a_pixel_become_one_and_none_is_lost():
    bars = [Bar("a-0", at, at, 3, "x", f"{at}-0") for at in range(0, 1000, 5)]
    bars += [Bar("a-0", 100, 900, 3, "long", "900-0")]
    bars_shown = merge_bars(bars, 50)
    assert len(bars_shown) < 60
    assert sum(bar.count for bar in bars_shown) == 201
    assert any(bar.label == "long" and bar.end - bar.begin == 800 for bar in bars_shown)


def test_the_newest_value_is_in_a_line_however_long_it_is():
    line = series.Series()
    for step in range(1, 4 * series.POINTS):
        line.add(1, step, float(step))
        assert line.points()[-1][1] == step
