"""Exports of a record: rows for TRL and verifiers, and spans of OpenInference.

A row of JSON lines or of Parquet has the columns of the record, but the short texts for lists.
Discarded answers are rows too, without a step.
Where an episode has chat messages, ``prompt`` and ``completion`` of a JSON line are lists of them,
and ``prompt_text`` and ``completion_text`` the texts.
Parts of a reward are ``metrics``, as in verifiers' results, and ``fate`` says if a later epoch took
the step again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, BinaryIO

from .columns import build_schema, import_pyarrow
from .conversation import to_chat
from .files import RecordedStep
from .reader import RolloutRecord

# Both follow from other columns, and spare pages the tokenizer.
_LEFT_OUT = ("preview", "token_texts")
_SCOPE = "trinity_events.record"
_ROLES = {"prompt": "user", "policy": "assistant", "environment": "tool"}
_INTERNAL = 1
"""SPAN_KIND_INTERNAL of OTLP."""


class ExportFormat(StrEnum):
    """Formats of exported rollouts, which also are the endings of their files."""

    jsonl = "jsonl"
    parquet = "parquet"
    openinference = "openinference"

    @property
    def ending(self) -> str:
        """Ending of a file's name."""
        return "openinference.jsonl" if self is ExportFormat.openinference else self.value


def write_rollouts(
    record: RolloutRecord, steps: Iterable[RecordedStep], form: ExportFormat, file: BinaryIO
) -> int:
    """Write the samples of steps, one step in memory at a time; return their number."""
    if form is ExportFormat.parquet:
        return _write_parquet(record, steps, file)
    count = 0
    for recorded in steps:
        at = record.find_time(recorded)
        for row in _read_rows(record, recorded):
            line = _to_line(row) if form is ExportFormat.jsonl else build_spans(row, at)
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            count += 1
    return count


def _to_line(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with chat messages in the place of texts, where its episode has messages."""
    messages = {name: row.pop(f"{name}_messages") for name in ("prompt", "completion")}
    for name, rows in messages.items():
        if rows is not None:
            row |= {f"{name}_text": row[name], name: to_chat(rows)}
    return row


def _read_rows(record: RolloutRecord, recorded: RecordedStep) -> Iterator[dict[str, Any]]:
    names = [name for name in record.column_names if name not in _LEFT_OUT]
    for row in record.read_all([recorded], names):
        row["metrics"] = row.pop("reward_parts")
        yield row


def _write_parquet(record: RolloutRecord, steps: Iterable[RecordedStep], file: BinaryIO) -> int:
    pa = import_pyarrow("an export of rollouts")
    fields = [
        field.with_name("metrics") if field.name == "reward_parts" else field
        for field in build_schema()
        if field.name not in _LEFT_OUT
    ]
    schema, count = pa.schema(fields), 0
    with pa.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for recorded in steps:
            rows = list(_read_rows(record, recorded))
            for row in rows:
                row["metrics"] = list(row["metrics"].items())
            writer.write_table(pa.Table.from_pylist(rows, schema))
            count += len(rows)
    return count


# --- spans ---------------------------------------------------------------------------------------


def build_spans(row: dict[str, Any], at: int) -> dict[str, Any]:
    """Return the spans of one sample as a line of an OTLP file, by OpenInference's conventions.

    An AGENT span has the episode, with an LLM span for each turn of the policy and a TOOL span for
    each of the environment below it. The record has no times of turns: all have that of the step.

    Args:
        row: The sample.
        at: Nanoseconds at which its step was recorded.
    """
    name = "/".join(
        str(row[part]) for part in ("run_id", "epoch", "step", "ordinal", "attempt", "sample")
    )
    # From the sample's name, so that a second export has the same spans. Ids of 16 and 8 bytes are
    # hexadecimal in OTLP's JSON, and not base 64.
    trace = hashlib.sha256(name.encode()).hexdigest()[:32]
    root = _span_id(name)
    prompt, *turns = row["turns"]
    spans = [
        _build_span(
            trace,
            root,
            "",
            f"rollout {row['ordinal']}.{row['sample']}",
            at,
            {
                "openinference.span.kind": "AGENT",
                "input.value": prompt["content"],
                "output.value": row["completion"],
                "session.id": row["run_id"],
                "metadata": json.dumps(_build_metadata(row)),
                "tag.tags": [row["fate"], *(["truncated"] if row["is_truncated"] else [])],
            },
        )
    ]
    by_turn = _messages_by_turn(row)
    messages, read = [*by_turn[0]], prompt["tokens"]
    for place, turn in enumerate(turns, 1):
        is_policy = turn["role"] == "policy"
        attributes: dict[str, Any] = {
            "openinference.span.kind": "LLM" if is_policy else "TOOL",
            "output.value": turn["content"],
        }
        if is_policy:
            attributes |= _build_messages("llm.input_messages", messages)
            attributes |= _build_messages("llm.output_messages", by_turn[place])
            attributes |= {
                "llm.model_name": row["run_id"],
                "llm.token_count.prompt": read,
                "llm.token_count.completion": turn["tokens"],
                "llm.token_count.total": read + turn["tokens"],
            }
        else:
            # The turn before it: `turns` begins after the prompt, and `place` counts that.
            attributes |= _build_tool(by_turn[place], turns[place - 2])
        title = f"{turn['role']} {place - 1}"
        name_of_span = _span_id(f"{name}/{place - 1}")
        spans.append(_build_span(trace, name_of_span, root, title, at, attributes))
        messages += by_turn[place]
        read += turn["tokens"]
    service = {"service.name": "trinity-events", "openinference.project.name": row["run_id"]}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _to_attributes(service)},
                "scopeSpans": [{"scope": {"name": _SCOPE}, "spans": spans}],
            }
        ]
    }


def _build_metadata(row: dict[str, Any]) -> dict[str, Any]:
    names = ("step", "epoch", "ordinal", "sample", "attempt", "explorer", "reward", "metrics")
    more = (
        "advantage",
        "staleness",
        "fate",
        "is_truncated",
        "versions",
        "reward_error",
        "judge_reply",
    )
    return {name: row[name] for name in (*names, *more)}


def _messages_by_turn(row: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the chat messages of each turn; of an episode of text, one for each turn."""
    turns = row["turns"]
    if row["prompt_messages"] is None:
        return [
            [{"role": _ROLES[turn["role"]], "content": turn["content"], "tool_calls": []}]
            for turn in turns
        ]
    messages = [*row["prompt_messages"], *row["completion_messages"]]
    return [
        [message for message in messages if message["turn"] == place] for place in range(len(turns))
    ]


def _build_tool(messages: list[dict[str, Any]], before: dict[str, Any]) -> dict[str, str]:
    """Return the attributes of an environment's turn: its tool, and what that was given."""
    names = [message.get("name") for message in messages if message.get("name")]
    arguments = [message.get("arguments") for message in messages if message.get("arguments")]
    return {
        "tool.name": ", ".join(map(str, names)) or "environment",
        "input.value": "\n".join(map(str, arguments)) or before["content"],
    }


def _build_messages(prefix: str, messages: list[dict[str, Any]]) -> dict[str, str]:
    attributes = {}
    for place, message in enumerate(messages):
        start = f"{prefix}.{place}.message"
        attributes[f"{start}.role"] = message["role"]
        attributes[f"{start}.content"] = message["content"]
        for name in ("name", "tool_call_id"):
            if message.get(name):
                attributes[f"{start}.{name}"] = message[name]
        for number, call in enumerate(message["tool_calls"]):
            of_call = f"{start}.tool_calls.{number}.tool_call"
            if call["id"]:
                attributes[f"{of_call}.id"] = call["id"]
            attributes[f"{of_call}.function.name"] = call["name"]
            attributes[f"{of_call}.function.arguments"] = call["arguments"]
    return attributes


def _build_span(
    trace: str, span: str, parent: str, name: str, at: int, attributes: dict[str, Any]
) -> dict[str, Any]:
    return {
        "traceId": trace,
        "spanId": span,
        "parentSpanId": parent,
        "name": name,
        "kind": _INTERNAL,
        # As text: 64 bits are more than a number of JSON holds.
        "startTimeUnixNano": str(at),
        "endTimeUnixNano": str(at),
        "attributes": _to_attributes(attributes),
    }


def _to_attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _to_value(value)} for name, value in values.items()]


def _to_value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [_to_value(item) for item in value]}}
    # As text, too: Protobuf's JSON has integers of 64 bits so.
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}


def _span_id(name: str) -> str:
    return hashlib.sha256(f"span/{name}".encode()).hexdigest()[:16]
