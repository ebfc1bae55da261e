"""Chat messages of episodes as the contract has them: bounded texts, for the record of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from trinity_schemas import ChatMessage
from trinity_schemas.rollouts import LONGEST_MESSAGES

from ..tasks.base import Message

_CUT = " … "
_LONGEST_NAME = 256


def convert_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Return messages with at most as many characters as a turn may have; later ones are cut."""
    room = LONGEST_MESSAGES

    def cut(value: object) -> str:
        nonlocal room
        text = value if isinstance(value, str) else _format_json(value)
        if len(text) > room:
            text = text[: max(room - len(_CUT), 0)] + _CUT[: min(room, len(_CUT))]
        room -= len(text)
        return text

    return [
        ChatMessage(
            role=str(message.get("role", ""))[:64],
            content=cut(_join_parts(message.get("content"))),
            name=str(message.get("name") or "")[:_LONGEST_NAME],
            tool_call_id=str(message.get("tool_call_id") or "")[:_LONGEST_NAME],
            arguments=cut(message.get("arguments") or ""),
            tool_calls=cut(message.get("tool_calls") or ""),
        )
        for message in messages[:4096]
    ]


def _join_parts(content: object) -> str:
    """Return a content as text, with the kind of each part that is none."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return _format_json(content)
    return "".join(
        str(part["text"])
        if isinstance(part, dict) and "text" in part
        else f"[{part['type']}]"
        if isinstance(part, dict) and "type" in part
        else str(part)
        for part in content
    )


def _format_json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    # A task's own objects: a record shows what it can, and an answer never fails for it.
    except (TypeError, ValueError, RecursionError):
        return str(value)
