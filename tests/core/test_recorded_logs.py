"""Logs of earlier versions fold to what they folded to, for ever: see support/recorded_logs.py."""

import json

import pytest

from tests.support.recorded_logs import FOLDER, TAPES, come_to
from trinity_events.archive.format import read_lines
from trinity_events.core import Monitor, MonitorState, decode_state, encode_state
from trinity_schemas import ANNOUNCEMENT_TYPES, ContractError, decode_envelope, event_tag

RECORDED = sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def recorded(name):
    """The run, its entries, the announcements' bytes, and what was expected of it."""
    header, lines = read_lines(FOLDER / f"{name}.jsonl")
    records = list(lines)
    events = [line.entry for line in records if line.stream == "events"]
    announced = [line.entry.payload for line in records if line.stream == "announcements"]
    expected = json.loads((FOLDER / f"{name}.expected.json").read_text())
    return header.run_id, events, announced, expected


def test_every_recorded_log_has_its_expectation_and_its_maker():
    assert sorted(TAPES) == RECORDED
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(
        f"{name}{end}" for name in RECORDED for end in (".expected.json", ".jsonl")
    )


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_bytes_fold_to_the_same_state_and_announcements(name):
    run_id, events, announced, expected = recorded(name)
    announcements, dead, state = come_to(run_id, events)
    assert [decode_envelope(payload) for payload in announcements] == [
        decode_envelope(payload) for payload in announced
    ]
    assert announcements == announced, "an announcement means the same, in other bytes"
    assert dead == expected["dead_letters"]
    assert state == expected["state"]


@pytest.mark.parametrize("name", RECORDED)
def test_a_snapshot_after_any_recorded_entry_goes_on_to_the_same_state(name):
    run_id, events, _, _ = recorded(name)
    straight = Monitor(MonitorState(run_id=run_id))
    straight.fold(events)
    for cut in range(len(events)):
        first = Monitor(MonitorState(run_id=run_id))
        first.fold(events[:cut])
        second = Monitor(decode_state(encode_state(first.state)))
        second.fold(events[cut:])
        assert second.state == straight.state


def test_the_recorded_logs_meet_every_anomaly_and_announcement_of_the_fold():
    anomalies, announced = set(), set()
    for name in RECORDED:
        _, _, payloads, expected = recorded(name)
        anomalies |= expected["state"].get("anomaly_counts", {}).keys()
        announced |= {event_tag(decode_envelope(payload).event) for payload in payloads}
    assert anomalies == {
        *("announcement-among-events", "duplicate", "gap", "late-attempt"),
        *("stale-epoch", "trained-twice", "undecodable", "unopened-epoch"),
    }
    # Nobody grants anything yet: admission is not there.
    assert announced == {event_tag(event_type) for event_type in ANNOUNCEMENT_TYPES} - {
        "save-granted"
    }


def test_a_log_of_a_later_version_loses_only_the_events_that_are_not_known():
    _, events, _, expected = recorded("later-version")
    state = expected["state"]
    assert set(state["ready"]) == {"state_dict", "weights"}
    assert state["anomaly_counts"] == {"undecodable": 3}
    unknown = 0
    for entry in events:
        try:
            decode_envelope(entry.payload)
        except ContractError:
            unknown += 1
    assert unknown == len(expected["dead_letters"]) == 3
