"""Timelines: every attempt, version, application and wait of a log has its span."""

from pathlib import Path

import pytest

from tests.support.event_histories import (
    History,
    committed,
    failed,
    finished,
    opened,
    part,
    registration,
    started,
)
from trinity_events.analysis.spans import Span
from trinity_events.analysis.timeline import Moment, Timeline, Value
from trinity_events.archive.format import read_lines
from trinity_events.core import Monitor, MonitorState
from trinity_schemas import (
    AppliedPhases,
    SaveFinished,
    SaveProgressed,
    SaveRequested,
    StepRef,
    StepTrained,
    WaitEnded,
    WaitStarted,
    WeightsApplied,
    decode_envelope,
)

RECORDED = sorted((Path(__file__).parents[1] / "recorded").glob("*.jsonl"))
SECOND = 1_000_000_000


def timeline_of(entries):
    monitor, timeline, parts = Monitor(MonitorState(run_id="history")), Timeline(), []
    for entry_id, envelope in entries:
        parts += timeline.add(entry_id, envelope)
        for announcement in monitor.apply(entry_id, envelope):
            parts += timeline.add(entry_id, announcement)
    return [*parts, *timeline.finish()]


def spans(parts, category):
    return [part for part in parts if isinstance(part, Span) and part.category == category]


def applied(step):
    return WeightsApplied(
        version=StepRef(1, step),
        digest="sha256:" + "0" * 64,
        bytes=8,
        verified_at=1.0,
        phases=AppliedPhases(fetch=0.25, pause=0.5),
    )


def test_an_attempt_is_a_span_from_its_start_to_its_end():
    history = History()
    history.add(committed(1, "state_dict", registration(expected=3)))
    for save, rank in (("a", 0), ("b", 1), ("c", 2)):
        history.add(started(1, save, rank=rank), by="actor", rank=rank)
    history.add(finished(1, "a"), by="actor")
    history.add(failed(1, "b", rank=1), by="actor", rank=1)
    saves = spans(timeline_of(history.entries), "save")
    assert [(save.process, save.facts["outcome"]) for save in saves] == [
        ("actor-0", "finished"),
        ("actor-1", "failed: disk full"),
        ("actor-2", "under way at the end of the log"),
    ]
    assert len({save.lane for save in saves}) == 3, "attempts overlap, and each has its own track"
    assert [save.end - save.begin for save in saves] == [3_000_000, 3_000_000, 2_000_000]


def test_a_flow_leads_from_a_version_to_each_application():
    history = History()
    history.add(opened(3))
    history.add(part(3))
    history.add(committed(3, "weights"))
    for rank in (0, 1):
        history.add(applied(3), by="explorer", rank=rank)
    parts = timeline_of(history.entries)
    [version] = spans(parts, "version")
    pauses = spans(parts, "pause")
    assert set(version.flows) == {pause.flow_end for pause in pauses}
    assert [pause.process for pause in pauses] == ["explorer-0", "explorer-1"]
    assert all(pause.end - pause.begin == SECOND // 2 for pause in pauses)
    assert all(fetch.end - fetch.begin == SECOND // 4 for fetch in spans(parts, "fetch"))


def test_a_wait_is_a_span_from_its_beginning_that_names_its_culprits():
    history = History()
    history.add(WaitStarted(wait_id="w", what="rollouts", waits_for=("explorer-0",), seconds=0.5))
    history.add(WaitStarted(wait_id="w", what="rollouts", waits_for=("explorer-0",), seconds=0.6))
    history.add(WaitEnded(wait_id="w", outcome="deadline"))
    [wait] = spans(timeline_of(history.entries), "wait")
    assert wait.facts == {"for": "explorer-0", "outcome": "deadline"}
    assert wait.end - wait.begin == SECOND // 2 + 2_000_000


def test_a_wait_for_a_turn_is_a_span_before_that_of_its_save():
    history = History()
    for save, rank in (("a", 0), ("b", 1)):
        requested = SaveRequested(save_id=save, slot=started(1, rank=rank).slot)
        history.add(requested, by="actor", rank=rank)
    history.add(started(1, "a"), by="actor")
    history.add(failed(1, "b", rank=1), by="actor", rank=1)
    history.add(finished(1, "a"), by="actor")
    parts = timeline_of(history.entries)
    [granted, refused], [save] = spans(parts, "wait"), spans(parts, "save")
    assert (granted.facts["outcome"], refused.facts["outcome"]) == ("granted", "failed: disk full")
    assert (granted.lane, granted.end) == (save.lane, save.begin)


def test_a_span_without_its_start_begins_by_the_measured_duration():
    history = History()
    slot = finished(1, "a").slot
    history.add(SaveProgressed(save_id="a", slot=slot, bytes=8), by="actor")
    history.add(SaveFinished(save_id="a", slot=slot, bytes=16, seconds=0.5), by="actor")
    history.add(WaitEnded(wait_id="w", outcome="over", seconds=0.25))
    parts = timeline_of(history.entries)
    [save], [wait] = spans(parts, "save"), spans(parts, "wait")
    assert (save.end - save.begin, wait.end - wait.begin) == (SECOND // 2, SECOND // 4)
    assert not save.has_start
    assert not wait.has_start


def test_metrics_and_steps_are_counters():
    history = History()
    for step in (1, 2):
        history.add(StepTrained(step=step, metrics={"loss": step / 2}))
    parts = timeline_of(history.entries)
    values = [(part.counter, part.value) for part in parts if isinstance(part, Value)]
    assert values == [("step", 1), ("loss", 0.5), ("step", 2), ("loss", 1.0)]
    assert [span.name for span in spans(parts, "train")] == ["step 2"]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_each_event_of_a_recorded_log_is_a_span_or_a_moment(path):
    timeline, parts = Timeline(), []
    for line in read_lines(path)[1]:
        try:
            envelope = decode_envelope(line.payload)
        except Exception:
            continue
        parts += timeline.add(line.id, envelope)
    parts += timeline.finish()
    assert any(isinstance(part, Moment) for part in parts)
    assert all(part.begin <= part.end for part in parts if isinstance(part, Span))
