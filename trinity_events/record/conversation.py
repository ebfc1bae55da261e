"""Conversation of an episode: its chat messages, with calls of tools and their results.

A policy writes calls as text. Blocks ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``,
which Qwen and Hermes models write, become ``tool_calls``. An environment with another syntax may
return ``name`` and ``arguments`` of the call with its result. Other text stays content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trinity_schemas import ChatMessage

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)

Row = dict[str, Any]
"""Message as a row of the record: see :func:`trinity_events.record.columns.build_schema`."""


def build_row(message: ChatMessage, turn: int) -> Row:
    """Return the row of a message that an explorer sent."""
    return _row(
        turn,
        message.role,
        message.content,
        name=message.name,
        tool_call_id=message.tool_call_id,
        arguments=message.arguments,
        calls=_read_calls(message.tool_calls),
    )


def build_policy_row(text: str, turn: int) -> Row:
    """Return the row of what the policy wrote, with the calls of tools that the text has."""
    calls: list[Row] = []

    def remove_call(block: re.Match[str]) -> str:
        block_calls = _read_calls(f"[{block[1]}]")
        calls.extend(block_calls)
        return "" if block_calls else block[0]

    content = _CALL.sub(remove_call, text)
    # Only what surrounded a call is stripped: blanks of a plain answer are the policy's.
    return _row(turn, "assistant", content.strip() if calls else text, calls=calls)


def link_calls(rows: Sequence[Row]) -> None:
    """Give a policy's message the calls that environments report next to their results."""
    latest: Row | None = None
    for row in rows:
        if row["role"] == "assistant":
            # Calls that were read from the text are those that the policy made.
            latest = None if row["tool_calls"] else row
        elif latest is not None and row["name"] and row["arguments"]:
            call = {"id": row["tool_call_id"], "name": row["name"], "arguments": row["arguments"]}
            latest["tool_calls"].append(call)


def to_chat(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows as chat messages of TRL and verifiers, without what is empty.

    Arguments that are a JSON object are one, as chat templates expect; others are a text.
    """
    return [_to_message(row) for row in rows]


def _to_message(row: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": row["role"], "content": row["content"]}
    for name in ("name", "tool_call_id"):
        if row[name]:
            message[name] = row[name]
    if row["tool_calls"]:
        message["tool_calls"] = [
            {
                **({"id": call["id"]} if call["id"] else {}),
                "type": "function",
                "function": {"name": call["name"], "arguments": _to_object(call["arguments"])},
            }
            for call in row["tool_calls"]
        ]
    return message


def _row(
    turn: int,
    role: str,
    content: str,
    *,
    name: str = "",
    tool_call_id: str = "",
    arguments: str = "",
    calls: Sequence[Row] = (),
) -> Row:
    return {
        "turn": turn,
        "role": role,
        "content": content,
        "name": name,
        "tool_call_id": tool_call_id,
        "arguments": arguments,
        "tool_calls": [*calls],
    }


def _read_calls(text: str) -> list[Row]:
    """Return the calls of a JSON list, each with a name; none if it is no such list."""
    try:
        values = json.loads(text or "[]")
        # With the function inside, as OpenAI's messages have it, or the function itself.
        calls = [value.get("function", value) | {"id": value.get("id", "")} for value in values]
        return [
            {
                "id": str(call["id"] or ""),
                "name": str(call["name"]),
                "arguments": _to_text(call.get("arguments", {})),
            }
            for call in calls
        ]
    # A policy writes what it likes: text that is no call stays text.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def _to_text(arguments: Any) -> str:
    # OpenAI's arguments are a text of JSON, and those in a policy's block an object.
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _to_object(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
