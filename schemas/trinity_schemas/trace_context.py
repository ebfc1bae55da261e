"""Trace contexts of weight versions, as the W3C's Trace Context writes them.

Ids are hashes of what every process knows, so that all parts of a version are in one trace without
a context that is handed from process to process. Producers in other languages compute the same:

- trace id: the first 16 bytes of SHA-256 of ``RUN/EPOCH/STEP``;
- id of a span: the first 8 bytes of SHA-256 of ``TRACE ID/NAME``, the trace id in hexadecimal;
- a step's root span is called ``step``, a part of its version
  ``INCARNATION/version-part-published``, an application of it ``INCARNATION/weights-applied``.

See https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

from hashlib import sha256

from .envelope import Trace
from .events import (
    Event,
    StepCommitted,
    VersionOpened,
    VersionPartPublished,
    VersionRefused,
    WeightsApplied,
    event_tag,
)
from .identity import StepRef

ROOT = "step"
"""Name of a step's root span."""


def trace_id(run_id: str, step: StepRef) -> str:
    """Return the id of a step's trace, 32 hexadecimal digits."""
    return sha256(f"{run_id}/{step.epoch}/{step.step}".encode()).hexdigest()[:32]


def span_id(trace: str, name: str) -> str:
    """Return the id of a span in a trace, 16 hexadecimal digits."""
    return sha256(f"{trace}/{name}".encode()).hexdigest()[:16]


def version_of(epoch: int, event: Event) -> StepRef | None:
    """Return the weight version that an event is about; None for all others."""
    match event:
        case WeightsApplied(version=version) | VersionRefused(version=version):
            return version
        case VersionOpened(step=step) | VersionPartPublished(step=step):
            return StepRef(epoch, step)
        case StepCommitted(step=step, kind="weights"):
            return StepRef(epoch, step)
        case _:
            return None


def trace_of(run_id: str, epoch: int, incarnation: str, event: Event) -> Trace | None:
    """Return the trace context of an event of a weight version; None for all others."""
    version = version_of(epoch, event)
    if version is None:
        return None
    # A part and an application are spans of their senders; other events are in the step's root.
    own = isinstance(event, VersionPartPublished | WeightsApplied)
    trace = trace_id(run_id, version)
    sender = span_id(trace, f"{incarnation}/{event_tag(event)}" if own else ROOT)
    # Version 00 of the format; the flag 01 says that the trace is sampled.
    return Trace(traceparent=f"00-{trace}-{sender}-01")
