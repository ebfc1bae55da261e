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

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.fixture(scope="module")
def trace(cli, tmp_path_factory):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    path = tmp_path_factory.mktemp("trace") / "run.pftrace"
    shown = cli("export", str(RECORDED / "complete.jsonl"), "--perfetto", "--output", str(path))
    assert shown.returncode == 0, shown.stderr
    assert re.fullmatch(rf"\d+ spans of run recorded-complete in {path}: .*\n", shown.stdout)
    found = Trace()
    found.ParseFromString(path.read_bytes())
    return list(found.packet)


@pytest.fixture(scope="module")
def told():
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

    wanted = getattr(TrackEvent, f"TYPE_{kind}")
    return [one.track_event for one in trace if one.track_event.type == wanted]


def test_every_span_that_begins_ends_and_on_its_own_track(trace):
    begins, ends = packets(trace, "SLICE_BEGIN"), packets(trace, "SLICE_END")
    tracks = {one.track_descriptor.uuid for one in trace if one.HasField("track_descriptor")}
    assert Counter(one.track_uuid for one in begins) == Counter(one.track_uuid for one in ends)
    assert {one.track_uuid for one in begins} <= tracks


def test_spans_and_flows_are_as_many_as_the_log_has(trace, told):
    events, announced = ([one.event for one in of] for of in told)
    begins = packets(trace, "SLICE_BEGIN")
    categories = Counter(one.categories[0] for one in begins)
    starts = sum(isinstance(one, SaveStarted) for one in events)
    applied = [one for one in events if isinstance(one, WeightsApplied)]
    ready = {
        (one.epoch, one.step)
        for one in announced
        if isinstance(one, StepReady) and one.kind == "weights"
    }
    assert categories["save"] + categories["publish"] >= starts > 0
    assert categories["fetch"] == categories["pause"] == len(applied) > 0
    assert categories["version"] >= len(ready) > 0
    begun = [flow for one in begins for flow in one.flow_ids]
    ended = [flow for one in begins for flow in one.terminating_flow_ids]
    assert sorted(begun) == sorted(ended)
    assert len(begun) == sum((one.version.epoch, one.version.step) in ready for one in applied) > 0


def test_counters_have_the_values_of_the_log(trace):
    counters = {
        one.track_descriptor.uuid: one.track_descriptor.name
        for one in trace
        if one.HasField("track_descriptor") and one.track_descriptor.HasField("counter")
    }
    assert "published bytes" in counters.values()
    values = [one.double_counter_value for one in packets(trace, "COUNTER")]
    assert values
    assert {one.track_uuid for one in packets(trace, "COUNTER")} == set(counters)


async def test_entries_are_cloudevents(cli, publisher, log, run_id):
    await log.append(b"\xff from elsewhere")
    shown = cli("tail", run_id, "--format", "cloudevents")
    opened, garbage = [json.loads(line) for line in shown.stdout.splitlines()]
    for one in (opened, garbage):
        assert {"specversion", "id", "source", "type"} <= one.keys()
        assert one["specversion"] == "1.0"
        assert all(re.fullmatch("[a-z0-9]{1,20}", name) for name in one)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00", one["time"])
        assert one["source"] == f"/runs/{run_id}/events"
    assert (opened["type"], opened["subject"]) == ("trinity-events.run-opened", "trainer-0")
    assert opened["data"]["type"] == "run-opened"
    schema = Path(__file__).parents[2] / opened["dataschema"]
    jsonschema.validate(opened["data"], json.loads(schema.read_text()))
    assert garbage["type"] == "trinity-events.undecodable"


def test_two_forms_at_once_are_refused(cli):
    shown = cli("tail", "any", "--json", "--format", "cloudevents")
    assert shown.stderr.startswith("error: --json and --format cloudevents contradict each other")
