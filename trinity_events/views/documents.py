"""Documents that commands print with ``--json``, and their JSON Schemas."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from trinity_schemas import Envelope, Kind, StepRef
from trinity_schemas.schemas import DIALECT, tidy

from ..analysis.audit import Audit
from ..analysis.causes import Cause, HostProcess
from ..analysis.changes import Change
from ..analysis.goodput import Goodput
from ..analysis.outcomes import OutcomeName
from ..analysis.proof import ProofEntry
from ..archive.verify import Report
from ..core import MonitorState
from ..core.state import OpenWait

Stream = Literal["events", "announcements"]


class _Document(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Document of a command; a field without a value is left out."""


class Prompts(_Document, frozen=True):
    """Sums of a run's prompts."""

    trained: int
    dropped: dict[str, int]
    """Dropped prompts by reason."""
    open: int


class RunRow(_Document, frozen=True):
    """Run, as ``runs --json`` lists it."""

    run_id: str
    opened_at: float | None
    """Unix seconds."""
    epoch: int
    trainer: str | None
    """Status of the trainer, or the reason with which the run was closed."""
    step: int
    last_event_at: float | None
    """Unix seconds."""
    reward: float | None
    """Mean reward of the last steps; null if none reported one."""
    total_steps: int | None
    """Steps after which the run ends; null if its configuration names none."""
    ready: dict[Kind, StepRef]
    """Newest ready step of each kind."""
    prompts: Prompts | UnsetType = UNSET
    silent_since: float | UnsetType = UNSET
    """Unix seconds of an abandoned run's last event."""


class _ShownWait(OpenWait, frozen=True, kw_only=True):
    """Open wait, with its age."""

    seconds: float | UnsetType = UNSET
    """Age of the wait."""
    seconds_left: float | UnsetType | None = UNSET
    """Seconds until it gives up; null without a deadline."""


class _ShownCause(Cause, frozen=True, kw_only=True):
    """Cause of a standstill, with its age."""

    seconds: float | UnsetType = UNSET
    """Age of the wait for it."""


class _State(MonitorState, kw_only=True):
    """State of a run; moments are Unix seconds."""

    silent_since: float | UnsetType = UNSET
    """Unix seconds of an abandoned run's last event."""


class _Status(_State, kw_only=True):
    """State of a run, with its processes on the host of the question."""

    processes: dict[str, HostProcess] | UnsetType = UNSET
    """Processes of an open run by role and rank."""
    reports_since: float | UnsetType = UNSET
    """Unix seconds of the oldest report of an explorer that no reducer has copied to the events."""


class Explanation(_Document, frozen=True):
    """Outcome of a step, or the waits of a run."""

    run_id: str
    epoch: int
    step: int | None
    kinds: dict[Kind, OutcomeName]
    """Outcome of each kind of the step."""
    explanation: str
    """The same in words, the cause first."""
    proof: list[ProofEntry] | UnsetType = UNSET
    waits: dict[str, _ShownWait] | UnsetType = UNSET
    causes: list[_ShownCause] | UnsetType = UNSET
    """Causes for which the run does not go on, the first cause first."""


class TailLine(Envelope, frozen=True, kw_only=True):
    """Entry of the log, as ``tail --json`` prints it."""

    id: str
    stream: Stream


class UndecodableLine(_Document, frozen=True):
    """Entry that cannot be decoded, with the reason."""

    id: str
    stream: Stream
    undecodable: str


class CloudEvent(_Document, frozen=True):
    """CloudEvent 1.0, as ``tail --format cloudevents`` prints it."""

    specversion: Literal["1.0"]
    id: str
    source: str
    type: str
    time: str
    datacontenttype: str
    data: dict[str, Any]
    dataschema: str | UnsetType = UNSET
    subject: str | UnsetType = UNSET
    epoch: int | UnsetType = UNSET
    node: str | UnsetType = UNSET
    incarnation: str | UnsetType = UNSET
    sequence: str | UnsetType = UNSET
    traceparent: str | UnsetType = UNSET
    tracestate: str | UnsetType = UNSET


class FoldedEntry(_Document, frozen=True):
    """Entry with its announcements."""

    id: str
    envelope: Envelope | None
    """Null for an entry that cannot be decoded."""
    announcements: list[Envelope]


class Step(FoldedEntry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entry with what it changed in the state, as ``replay --step --json`` prints it."""

    changes: list[Change]


class Difference(_Document, frozen=True, rename={"begin": "from", "end": "to"}):
    """Fields that differ between the states after two entries."""

    run_id: str
    begin: str
    end: str
    changes: list[Change]


class Bisection(_Document, frozen=True):
    """First entry after which an expression is true; null if there is none."""

    run_id: str
    expression: str
    entry: FoldedEntry | None = msgspec.field(name="found")


DOCUMENTS: dict[str, Any] = {
    "audit": Audit,
    "goodput": Goodput,
    "bisect": Bisection,
    "diff": Difference,
    "explain": Explanation,
    "replay": _State,
    "replay-step": Step,
    "runs": list[RunRow],
    "status": _Status,
    "tail": (TailLine, UndecodableLine),
    "tail-cloudevents": CloudEvent,
    "verify": Report,
}
"""Type of each document, or types, by command and option."""

_MOMENTS = {
    *("opened_at", "closed_at", "since", "heard_at", "applied_at", "requested_at"),
    *("committed_at", "step_times"),
}
_MOMENTS_BY_NAME = {"waiting", "running"}
"""Fields of moments in the state, which JSON has in seconds instead of milliseconds."""


def document_schema(document: Any) -> dict[str, Any]:
    """Return the JSON Schema of a document: of a type, or of one of several."""
    types = document if isinstance(document, tuple) else (document,)
    schemas, named = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    schema = tidy({"$schema": DIALECT, "anyOf": list(schemas), "$defs": named})
    # The schema follows from the types, whose moments are whole milliseconds.
    _in_seconds(schema)
    if "RewardError" in named:  # elsewhere `at` is a step, or a time in milliseconds
        named["RewardError"]["properties"]["at"]["type"] = "number"
    return schema


def _in_seconds(schema: Any, name: str = "") -> None:
    """Let the moments of a state be numbers with fractions."""
    if isinstance(schema, list):
        for inner_schema in schema:
            _in_seconds(inner_schema, name)
        return
    if not isinstance(schema, dict):
        return
    if name in _MOMENTS and schema.get("type") == "integer":
        schema["type"] = "number"
    for field, inner in schema.items():
        # Names below these are fields; all others are keywords of JSON Schema.
        if field in ("properties", "$defs"):
            for property_name, inner_schema in inner.items():
                _in_seconds(inner_schema, property_name)
        elif field == "additionalProperties" and name in _MOMENTS_BY_NAME:
            _in_seconds(inner, "since")
        else:
            _in_seconds(inner, name)
