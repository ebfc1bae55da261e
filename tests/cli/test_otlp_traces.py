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
from trinity_events.log.publishing.publisher import EnvelopeFactory
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
    return {
        attribute.key: attribute.value.string_value or attribute.value.int_value
        for attribute in span.attributes
    }


@pytest.fixture(scope="module")
def spans(cli):
    with collector() as (url, requests):
        shown = cli("traces", str(RECORDED), "--to", url + "/")
        assert shown.returncode == 0, shown.stderr
    exported = []
    for path, body in requests:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                assert scope.schema_url.startswith("https://opentelemetry.io/schemas/")
                exported += scope.spans
    assert shown.stdout == f"{len(exported)} spans given to {url}\n"
    return exported


@pytest.fixture(scope="module")
def events():
    from trinity_events.archive.format import read_lines

    lines = [line for line in read_lines(RECORDED)[1] if line.stream == "events"]
    return [decode_envelope(line.payload) for line in lines]


def test_each_part_and_application_of_a_version_is_in_the_trace_of_its_step(spans, events):
    by_trace = defaultdict(list)
    for span in spans:
        by_trace[span.trace_id.hex()].append(span)
    versions = {version_of(envelope.epoch, envelope.event) for envelope in events} - {None}
    assert versions
    for version in versions:
        counts = Counter(
            span.name.split()[0] for span in by_trace[trace_id(events[0].run_id, version)]
        )
        events_of_version = [
            envelope.event
            for envelope in events
            if version_of(envelope.epoch, envelope.event) == version
        ]
        parts = sum(isinstance(event, VersionPartPublished) for event in events_of_version)
        applied = sum(isinstance(event, WeightsApplied) for event in events_of_version)
        assert (counts["publish"], counts["pause"], counts["fetch"]) == (parts, applied, applied)
        assert counts["step"] == 1


def test_a_span_of_a_step_is_below_its_root_and_within_it(spans):
    roots = {span.trace_id: span for span in spans if span.name.startswith("step ")}
    below = [span for span in spans if span.trace_id in roots and span not in roots.values()]
    assert below
    for span in below:
        root = roots[span.trace_id]
        assert span.parent_span_id == root.span_id
        assert root.span_id.hex() == span_id(root.trace_id.hex(), ROOT)
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    assert len({(span.trace_id, span.span_id) for span in spans}) == len(spans)


def test_an_application_links_to_the_parts_of_its_version(spans):
    published = {span.span_id: span for span in spans if span.kind == Span.SPAN_KIND_PRODUCER}
    pauses = [span for span in spans if span.name.startswith("pause ")]
    assert pauses
    for pause in pauses:
        assert pause.links
        assert all(published[link.span_id].trace_id == pause.trace_id for link in pause.links)
        attributes_of_pause = attributes(pause)
        assert attributes_of_pause["messaging.system"] == "redis"
        assert attributes_of_pause["messaging.operation.type"] == "process"


def test_an_event_carries_the_context_of_its_span():
    sent = []
    actor = EnvelopeFactory("run", 1, new_producer("actor"))
    trained = decode_envelope(actor.next(StepTrained(step=1)))
    envelopes = [decode_envelope(actor.next(event)) for event in (opened(1), part(1))]
    assert trained.trace is None, "it is of no version"
    traces, timeline = StepTraces("run", sent.extend), Timeline()
    for number, envelope in enumerate(envelopes, 1):
        traces.add_all(timeline.add(f"{number}-0", envelope))
    traces.add_all(timeline.finish())
    traces.finish()
    [publish] = [span for span in sent if span.name.startswith("publish ")]
    [root] = [span for span in sent if span.name.startswith("step ")]
    contexts = [envelope.trace.traceparent for envelope in envelopes]
    assert contexts == [
        f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"
        for span in (root, publish)
    ]


def test_a_failed_save_is_an_error():
    history, sent = History(), []
    traces, timeline = StepTraces("history", sent.extend), Timeline()
    for event in (started(2, "a"), failed(2, "a")):
        history.add(event, by="actor")
    for entry_id, envelope in history.entries:
        traces.add_all(timeline.add(entry_id, envelope))
    traces.finish()
    [save] = [span for span in sent if span.name.startswith("save ")]
    assert save.status.status_code.value == Status.STATUS_CODE_ERROR


@pytest.mark.parametrize("status", [400, None], ids=["refused", "absent"])
def test_a_collector_that_takes_no_spans_is_one_sentence(cli, status):
    with collector(status or 200) as (collector_url, _), socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nothing listens there
        url = collector_url if status else f"http://127.0.0.1:{free.getsockname()[1]}"
        shown = cli("traces", str(RECORDED), "--to", url, "--timeout", "1")
    assert shown.returncode != 0
    assert f"the collector at {url} takes no spans: " in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1, shown.stderr


def test_an_address_that_is_none_is_one_sentence(cli):
    shown = cli("traces", str(RECORDED), "--to", "localhost:4318")
    assert shown.returncode != 0
    assert "is no address of a collector: give http://HOST:PORT" in shown.stderr
