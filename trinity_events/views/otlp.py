"""Timelines as spans of OpenTelemetry, by opentelemetry-sdk (extra ``otlp``).

All spans of a step are in one trace, whose id every process computes: see
``trinity_schemas.trace_context``.
Attributes follow OpenTelemetry's conventions of messaging systems in the version of ``SCHEMA``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct, field
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from trinity_schemas import RunKeys, StepRef
from trinity_schemas.trace_context import ROOT, span_id, trace_id

from ..analysis.spans import Span
from ..analysis.timeline import Part

SCHEMA = Schemas.V1_36_0.value
"""Version of the conventions that names of attributes are from."""
_OPEN_STEPS = 64
"""Steps whose root span waits for further spans."""
_LINKS = 16
"""Maximum links of an application to parts of its version."""
# Spans of one request: a log may have millions, and none is kept once it was sent.
_BATCH = 256
_KINDS = {"publish": SpanKind.PRODUCER, "fetch": SpanKind.CONSUMER, "pause": SpanKind.CONSUMER}
_OPERATIONS = {"publish": "send", "fetch": "receive", "pause": "process"}


class _StepTrace(Struct):
    begin: int
    end: int
    parts: list[SpanContext] = field(default_factory=list)


class StepTraces:
    """Converter of a timeline's spans, in the order in which they end.

    A step's root span follows once the step is no longer among the last ones, or at the end.

    Args:
        run_id: The run.
        send: Function that is given spans in batches.
    """

    def __init__(self, run_id: str, send: Callable[[Sequence[ReadableSpan]], None]) -> None:
        self.spans = 0
        """Number of spans that were given to ``send``."""
        self._run = run_id
        self._send = send
        self._batch: list[ReadableSpan] = []
        self._steps: dict[StepRef, _StepTrace] = {}
        self._resources: dict[str, Resource] = {}
        self._scope = InstrumentationScope("trinity_events", schema_url=SCHEMA)

    def add_all(self, parts: Iterable[Part]) -> None:
        """Take parts of a timeline; moments and values have no span."""
        for part in parts:
            if isinstance(part, Span):
                self._add(part)

    def flush(self) -> None:
        """Send what waits for a full batch; root spans of open steps stay open."""
        if self._batch:
            self._send(self._batch)
            self.spans += len(self._batch)
            self._batch = []

    def finish(self) -> None:
        """Send everything, with the root spans of the last steps."""
        for step in list(self._steps):
            self._end_step(step)
        self.flush()

    def _add(self, span: Span) -> None:
        # Computed, not drawn: a log that is exported twice has the same spans (decision 26).
        own = span_id(
            _trace(self._run, span), f"{span.process}/{span.lane}/{span.name}/{span.begin}"
        )
        context = _context(_trace(self._run, span), own)
        if span.trace is not None:
            # W3C Trace Context: version, trace id, span id and flags, with dashes between them.
            context = _context(*span.trace.traceparent.split("-")[1:3])
        links: list[Link] = []
        if span.step is not None:
            step = self._open_step(span.step, span)
            if span.category == "publish":
                # Only the last ones: a version may have thousands of parts.
                step.parts = [*step.parts, context][-_LINKS:]
            elif span.category == "pause":
                links = [Link(context) for context in step.parts]
        self._append(
            ReadableSpan(
                name=f"{span.category} {span.name}",
                context=context,
                parent=None if span.step is None else self._root(span.step),
                resource=self._resource(span.process),
                attributes=self._attributes(span),
                links=links,
                kind=_KINDS.get(span.category, SpanKind.INTERNAL),
                status=_status(span),
                start_time=span.begin,
                end_time=span.end,
                instrumentation_scope=self._scope,
            )
        )

    def _open_step(self, ref: StepRef, span: Span) -> _StepTrace:
        step = self._steps.get(ref)
        if step is None:
            step = self._steps[ref] = _StepTrace(span.begin, span.end)
            # An endless log never says that a step gets no more spans.
            if len(self._steps) > _OPEN_STEPS:
                self._end_step(next(iter(self._steps)))
        step.begin, step.end = min(step.begin, span.begin), max(step.end, span.end)
        return step

    def _end_step(self, ref: StepRef) -> None:
        step = self._steps.pop(ref)
        self._append(
            ReadableSpan(
                name=f"step {ref.epoch}/{ref.step}",
                context=self._root(ref),
                resource=self._resource("run"),
                attributes=self._step_attributes(ref),
                start_time=step.begin,
                end_time=step.end,
                instrumentation_scope=self._scope,
            )
        )

    def _append(self, span: ReadableSpan) -> None:
        self._batch.append(span)
        if len(self._batch) >= _BATCH:
            self.flush()

    def _root(self, step: StepRef) -> SpanContext:
        trace = trace_id(self._run, step)
        return _context(trace, span_id(trace, ROOT))

    def _resource(self, process: str) -> Resource:
        resource = self._resources.get(process)
        if resource is None:
            resource = self._resources[process] = Resource(
                {"service.name": "trinity-events", "service.instance.id": process}, SCHEMA
            )
        return resource

    def _step_attributes(self, step: StepRef) -> dict[str, str | int]:
        return {"trinity.run": self._run, "trinity.epoch": step.epoch, "trinity.step": step.step}

    def _attributes(self, span: Span) -> dict[str, str | int]:
        attributes: dict[str, str | int] = {
            f"trinity.{name}": value for name, value in span.facts.items()
        }
        attributes["trinity.run"] = self._run
        if span.step is not None:
            attributes |= self._step_attributes(span.step)
        operation = _OPERATIONS.get(span.category)
        if operation is not None:
            attributes |= {
                "messaging.system": "redis",
                "messaging.destination.name": RunKeys.of(self._run).events,
                "messaging.operation.type": operation,
                "messaging.operation.name": span.category,
            }
        return attributes


def _trace(run_id: str, span: Span) -> str:
    """Return the id of the trace of a span; a span of no step has one of its own."""
    if span.step is not None:
        return trace_id(run_id, span.step)
    # A trace's id has 16 bytes, and a span's eight: two of them are joined.
    return span_id(run_id, f"{span.lane}/{span.begin}") + span_id(run_id, span.process)


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(
        int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


def _status(span: Span) -> Status:
    outcome = str(span.facts.get("outcome", ""))
    # OpenTelemetry leaves the status unset for what went well.
    if outcome.startswith(("failed", "lease expired", "timed out")):
        return Status(StatusCode.ERROR, outcome)
    return Status(StatusCode.UNSET)
