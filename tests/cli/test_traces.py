"""Logs in other tools' formats: Perfetto traces read back by its own protos, and CloudEvents."""

import json
import re
from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from trinity_events.archive.format import read_lines
from trinity_events.core import Monitor, MonitorState
from trinity_schemas import (
    ContractError,
    SaveStarted,
    StepReady,
    WeightsApplied,
    decode_envelope,
)
from trinity_schemas.documents import message_documents

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.fixture(scope="module")
def trace(cli, tmp_path_factory):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    path = tmp_path_factory.mktemp("trace") / "run.pftrace"
    shown = cli("export", str(RECORDED / "complete.jsonl"), "--perfetto", "--output", str(path))
    assert shown.returncode == 0, shown.stderr
    assert re.fullmatch(rf"\d+ spans of run recorded-complete in {path}: .*\n", shown.stdout)
    decoded = Trace()
    decoded.ParseFromString(path.read_bytes())
    return list(decoded.packet)


@pytest.fixture(scope="module")
def recorded():
    """Envelopes of the recorded log, and what the fold announces of them."""
    monitor, events, announced = Monitor(MonitorState(run_id="recorded-complete")), [], []
    for line in read_lines(RECORDED / "complete.jsonl")[1]:
        if line.stream == "events":
            try:
                envelope = decode_envelope(line.payload)
            except ContractError:
                continue
            events.append(envelope)
            announced += monitor.apply(line.id, envelope)
    return events, announced


def packets(trace, kind):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    event_type = getattr(TrackEvent, f"TYPE_{kind}")
    return [packet.track_event for packet in trace if packet.track_event.type == event_type]


def test_every_span_that_begins_ends_and_on_its_own_track(trace):
    begins, ends = packets(trace, "SLICE_BEGIN"), packets(trace, "SLICE_END")
    tracks = {
        packet.track_descriptor.uuid for packet in trace if packet.HasField("track_descriptor")
    }
    assert Counter(event.track_uuid for event in begins) == Counter(
        event.track_uuid for event in ends
    )
    assert {event.track_uuid for event in begins} <= tracks


def test_spans_and_flows_are_as_many_as_the_log_has(trace, recorded):
    events, announced = ([entry.event for entry in of] for of in recorded)
    begins = packets(trace, "SLICE_BEGIN")
    categories = Counter(event.categories[0] for event in begins)
    starts = sum(isinstance(event, SaveStarted) for event in events)
    applied = [event for event in events if isinstance(event, WeightsApplied)]
    ready = {
        (event.epoch, event.step)
        for event in announced
        if isinstance(event, StepReady) and event.kind == "weights"
    }
    assert categories["save"] + categories["publish"] >= starts > 0
    assert categories["fetch"] == categories["pause"] == len(applied) > 0
    assert categories["version"] >= len(ready) > 0
    begun = [flow for event in begins for flow in event.flow_ids]
    ended = [flow for event in begins for flow in event.terminating_flow_ids]
    assert sorted(begun) == sorted(ended)
    assert (
        len(begun)
        == sum(
            (application.version.epoch, application.version.step) in ready
            for application in applied
        )
        > 0
    )


def test_counters_have_the_values_of_the_log(trace):
    counters = {
        packet.track_descriptor.uuid: packet.track_descriptor.name
        for packet in trace
        if packet.HasField("track_descriptor") and packet.track_descriptor.HasField("counter")
    }
    assert "published bytes" in counters.values()
    values = [event.double_counter_value for event in packets(trace, "COUNTER")]
    assert values
    assert {event.track_uuid for event in packets(trace, "COUNTER")} == set(counters)


async def test_entries_are_cloudevents(cli, publisher, log, run_id):
    await log.append(b"\xff from elsewhere")
    shown = cli("tail", run_id, "--format", "cloudevents")
    opened, garbage = [json.loads(line) for line in shown.stdout.splitlines()]
    for record in (opened, garbage):
        assert {"specversion", "id", "source", "type"} <= record.keys()
        assert record["specversion"] == "1.0"
        assert all(re.fullmatch("[a-z0-9]{1,20}", name) for name in record)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00", record["time"])
        assert record["source"] == f"/runs/{run_id}/events"
    assert (opened["type"], opened["subject"]) == ("trinity-events.run-opened", "trainer-0")
    assert opened["data"]["type"] == "run-opened"
    folder, _, name = opened["dataschema"].rpartition("/")
    assert folder == "schemas/json"
    jsonschema.validate(opened["data"], json.loads(message_documents()[name]))
    assert garbage["type"] == "trinity-events.undecodable"


def test_two_forms_at_once_are_refused(cli):
    shown = cli("tail", "any", "--json", "--format", "cloudevents")
    assert shown.stderr.startswith("error: --json and --format cloudevents contradict each other")
