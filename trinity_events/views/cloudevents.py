"""Entries as CloudEvents 1.0, in the JSON format."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET

from trinity_schemas import ContractError, Envelope, event_tag, to_json

from ..core.fold_state import format_producer
from ..log import Entry, Stream, position
from ..log.position import LATEST
from .documents import CloudEvent

_TYPE = "trinity-events"
_SCHEMAS = "schemas/json/"
"""Folder of a checkout after ``make schemas``, with the schema of each event."""


def build_cloudevent(
    run_id: str, stream: Stream, entry: Entry, envelope: Envelope | ContractError
) -> CloudEvent:
    """Return an entry as a CloudEvent; source and id together identify it among all runs.

    The trace context is that of the extension for distributed tracing. An entry that cannot be
    decoded has the reason as its data.
    """
    # An id may name any millisecond of 64 bits, and Python's dates end with the year 9999.
    milliseconds = min(position(entry.id)[0], LATEST)
    attributes: dict[str, Any] = {
        "specversion": "1.0",
        "id": entry.id,
        "source": f"/runs/{run_id}/{stream.value}",
        "time": datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(),
        "datacontenttype": "application/json",
    }
    if isinstance(envelope, ContractError):
        data = {"undecodable": str(envelope)}
        return CloudEvent(**attributes, type=f"{_TYPE}.undecodable", data=data)
    producer, trace, tag = envelope.producer, envelope.trace, event_tag(envelope.event)
    return CloudEvent(
        **attributes,
        type=f"{_TYPE}.{tag}",
        dataschema=f"{_SCHEMAS}{tag}.json",
        subject=format_producer(producer),
        epoch=envelope.epoch,
        node=producer.node,
        incarnation=producer.incarnation,
        # As text: the type system of CloudEvents has integers of 32 bits alone.
        sequence=str(envelope.sequence),
        data=to_json(envelope)["event"],
        traceparent=UNSET if trace is None else trace.traceparent,
        tracestate=UNSET if trace is None or not trace.tracestate else trace.tracestate,
    )
