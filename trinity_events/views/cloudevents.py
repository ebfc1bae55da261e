"""Entries as CloudEvents 1.0, in the JSON format."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from trinity_schemas import ContractError, Envelope, event_tag, to_json

from ..core.fold_state import format_producer
from ..log import Entry, Stream, position
from ..log.position import LATEST

_TYPE = "trinity-events"
_SCHEMAS = "schemas/json/"
"""Folder of a checkout after ``make schemas``, with the schema of each event."""


def as_cloudevent(
    run_id: str, stream: Stream, entry: Entry, envelope: Envelope | ContractError
) -> dict[str, Any]:
    """Return an entry as a CloudEvent; source and id together identify it among all runs.

    The trace context is that of the extension for distributed tracing. An entry that cannot be
    decoded has the reason as its data.
    """
    milliseconds = min(position(entry.id)[0], LATEST)
    attributes: dict[str, Any] = {
        "specversion": "1.0",
        "id": entry.id,
        "source": f"/runs/{run_id}/{stream.value}",
        "type": f"{_TYPE}.undecodable",
        "time": datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(),
        "datacontenttype": "application/json",
    }
    if isinstance(envelope, ContractError):
        return attributes | {"data": {"undecodable": str(envelope)}}
    producer = envelope.producer
    attributes |= {
        "type": f"{_TYPE}.{event_tag(envelope.event)}",
        "dataschema": f"{_SCHEMAS}{event_tag(envelope.event)}.json",
        "subject": format_producer(producer),
        "epoch": envelope.epoch,
        "node": producer.node,
        "incarnation": producer.incarnation,
        "sequence": str(envelope.sequence),
        "data": to_json(envelope)["event"],
    }
    if envelope.trace is not None:
        attributes["traceparent"] = envelope.trace.traceparent
        if envelope.trace.tracestate:
            attributes["tracestate"] = envelope.trace.tracestate
    return attributes
