"""``trinity-events traces``, given to a collector that decodes OTLP's own protocol buffers."""

import gzip
import socket
import threading
from collections import Counter, defaultdict
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.event_histories import History, failed, opened, part, started
from trinity_events.analysis.timeline import Timeline
from trinity_events.log import new_producer
from trinity_events.log.publishing.envelopes import EnvelopeFactory
from trinity_events.views.otlp import StepTraces
from trinity_schemas import StepTrained, VersionPartPublished, WeightsApplied, decode_envelope
from trinity_schemas.trace_context import ROOT, span_id, trace_id, version_of

RECORDED = Path(__file__).parents[1] / "recorded" / "complete.jsonl"


@contextmanager
def collector(status=200):
    """An HTTP server that takes traces; yields its address and the requests it was sent."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            requests.append((self.path, body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


def attributes(span):
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


@pytest.fixture(scope="module")
def spans(cli):
    with collector() as (url, requests):
        shown = cli("traces", str(RECORDED), "--to", url + "/")
        assert shown.returncode == 0, shown.stderr
    found = []
    for path, body in requests:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                assert scope.schema_url.startswith("https://opentelemetry.io/schemas/")
                found += scope.spans
    assert shown.stdout == f"{len(found)} spans given to {url}\n"
    return found


@pytest.fixture(scope="module")
def events():
    from trinity_events.archive.format import read_lines

    lines = [one for one in read_lines(RECORDED)[1] if one.stream == "events"]
    return [decode_envelope(one.payload) for one in lines]


def test_each_part_and_application_of_a_version_is_in_the_trace_of_its_step(spans, events):
    by_trace = defaultdict(list)
    for span in spans:
        by_trace[span.trace_id.hex()].append(span)
    versions = {version_of(one.epoch, one.event) for one in events} - {None}
    assert versions
    for version in versions:
        found = Counter(
            one.name.split()[0] for one in by_trace[trace_id(events[0].run_id, version)]
        )
        told = [one.event for one in events if version_of(one.epoch, one.event) == version]
        parts = sum(isinstance(one, VersionPartPublished) for one in told)
        applied = sum(isinstance(one, WeightsApplied) for one in told)
        assert (found["publish"], found["pause"], found["fetch"]) == (parts, applied, applied)
        assert found["step"] == 1


def test_a_span_of_a_step_is_below_its_root_and_within_it(spans):
    roots = {one.trace_id: one for one in spans if one.name.startswith("step ")}
    below = [one for one in spans if one.trace_id in roots and one not in roots.values()]
    assert below
    for span in below:
        root = roots[span.trace_id]
        assert span.parent_span_id == root.span_id
        assert root.span_id.hex() == span_id(root.trace_id.hex(), ROOT)
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    assert len({(one.trace_id, one.span_id) for one in spans}) == len(spans)


def test_an_application_links_to_the_parts_of_its_version(spans):
    published = {one.span_id: one for one in spans if one.kind == Span.SPAN_KIND_PRODUCER}
    pauses = [one for one in spans if one.name.startswith("pause ")]
    assert pauses
    for pause in pauses:
        assert pause.links
        assert all(published[one.span_id].trace_id == pause.trace_id for one in pause.links)
        told = attributes(pause)
        assert told["messaging.system"] == "redis"
        assert told["messaging.operation.type"] == "process"


def test_an_event_carries_the_context_of_its_span():
    sent = []
    actor = EnvelopeFactory("run", 1, new_producer("actor"))
    trained = decode_envelope(actor.next(StepTrained(step=1)))
    envelopes = [decode_envelope(actor.next(one)) for one in (opened(1), part(1))]
    assert trained.trace is None, "it is of no version"
    traces, timeline = StepTraces("run", sent.extend), Timeline()
    for number, envelope in enumerate(envelopes, 1):
        traces.add_all(timeline.add(f"{number}-0", envelope))
    traces.add_all(timeline.finish())
    traces.finish()
    [publish] = [one for one in sent if one.name.startswith("publish ")]
    [root] = [one for one in sent if one.name.startswith("step ")]
    contexts = [one.trace.traceparent for one in envelopes]
    assert contexts == [
        f"00-{one.context.trace_id:032x}-{one.context.span_id:016x}-01" for one in (root, publish)
    ]


def test_a_failed_save_is_an_error():
    history, sent = History(), []
    traces, timeline = StepTraces("history", sent.extend), Timeline()
    for event in (started(2, "a"), failed(2, "a")):
        history.add(event, by="actor")
    for entry_id, envelope in history.entries:
        traces.add_all(timeline.add(entry_id, envelope))
    traces.finish()
    [save] = [one for one in sent if one.name.startswith("save ")]
    assert save.status.status_code.value == Status.STATUS_CODE_ERROR


@pytest.mark.parametrize("status", [400, None], ids=["refused", "absent"])
def test_a_collector_that_takes_no_spans_is_one_sentence(cli, status):
    with collector(status or 200) as (taken, _), socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nothing listens there
        url = taken if status else f"http://127.0.0.1:{free.getsockname()[1]}"
        shown = cli("traces", str(RECORDED), "--to", url, "--timeout", "1")
    assert shown.returncode != 0
    assert f"the collector at {url} takes no spans: " in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1, shown.stderr


def test_an_address_that_is_none_is_one_sentence(cli):
    shown = cli("traces", str(RECORDED), "--to", "localhost:4318")
    assert shown.returncode != 0
    assert "is no address of a collector: give http://HOST:PORT" in shown.stderr
