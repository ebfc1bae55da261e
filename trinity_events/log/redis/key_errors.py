"""Errors for keys of a run that another program wrote, each with its way out."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar

import redis

from trinity_schemas import RunKeys

from ...errors import KeyConflict, LogExhausted
from ...system.error_text import shorten
from ..position import position

C = TypeVar("C")

_TYPES = {
    **dict.fromkeys(("evaluations", "judged"), "stream"),
    **dict.fromkeys(
        ("events", "announcements", "dead", "experiences", "rollouts", "promoted", "reports"),
        "stream",
    ),
    **dict.fromkeys(
        ("position", "epoch", "fence", "leader", "snapshot", "identity", "folder", "reported"),
        "string",
    ),
    **{"current": "hash", "holds": "zset", "doomed": "set"},
}
_NUMBERS = ("epoch", "fence")
_WRONG_TYPE = "WRONGTYPE"
_CHECKED = re.compile(rf"{_WRONG_TYPE} (trinity:.+) is a (\w+), where the log keeps a (\w+)")
"""Reply of a script that checks the types of its keys before it writes."""
_LONGEST_SHOWN = 40
"""Characters of a value that an error shows: another program wrote it."""
_NO_NUMBER = "value is not an integer"


def naming_key_conflicts(log: type[C]) -> type[C]:
    """Make the methods of a log raise KeyConflict if the server reports a wrong type."""
    for name, method in list(vars(log).items()):
        # Private methods run inside of public ones, which name the conflict.
        if iscoroutinefunction(method) and not name.startswith("_"):
            setattr(log, name, _naming(method))
    return log


def _naming(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(method)
    async def wrapper(self: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return await method(self, *args, **keywords)
        except redis.ResponseError as error:
            if is_exhausted(error):
                raise exhausted(f"the log of run {self.run_id}") from None
            conflict = await _conflict(self._redis, self.keys, str(error))
            if conflict is None:
                raise
            raise conflict from None

    return wrapper


def is_exhausted(error: redis.ResponseError) -> bool:
    """Return True if a stream takes no more entries, since one has the largest possible id."""
    return "exhausted the last possible ID" in str(error)


def exhausted(what: str) -> LogExhausted:
    """Return the error for a log that takes no more entries."""
    return LogExhausted(what)


async def _conflict(client: Any, keys: RunKeys, reply: str) -> KeyConflict | None:
    """Return the error for a reply of the server; None if no key is the cause."""
    if (checked := _CHECKED.match(reply)) is not None:
        return wrong_type(*checked.groups())
    if not reply.startswith(_WRONG_TYPE) and _NO_NUMBER not in reply:
        return None
    try:
        for field, expected in _TYPES.items():
            key = getattr(keys, field)
            actual = (await client.type(key)).decode()
            if actual not in ("none", expected):
                return wrong_type(key, actual, expected)
            if field in _NUMBERS and actual != "none":
                parse_number(key, await client.get(key))
    except KeyConflict as conflict:
        return conflict
    except redis.RedisError:
        pass  # no permission, or no server: the caller raises the reply itself
    return None


@asynccontextmanager
async def naming_wrong_type(client: Any, key: str, expected: str) -> AsyncIterator[None]:
    """Raise KeyConflict if the block fails since the key is of another type."""
    try:
        yield
    except redis.ResponseError as error:
        if is_exhausted(error):
            raise exhausted(key) from None
        if not str(error).startswith(_WRONG_TYPE):
            raise
        raise wrong_type(key, (await client.type(key)).decode(), expected) from None


def wrong_type(key: str, actual: str, expected: str) -> KeyConflict:
    """Return the error for a key of another type."""
    return KeyConflict(key, "type", actual, expected)


def parse_number(key: str, value: bytes | None) -> int:
    """Return the number in a key; 0 if there is none. Raises KeyConflict."""
    try:
        return int(value or 0)
    except ValueError:
        raise KeyConflict(key, "number", _format(value)) from None


def parse_position(key: str, value: bytes) -> str:
    """Return the position in a key. Raises KeyConflict."""
    try:
        return _position(value)
    except ValueError:
        raise KeyConflict(key, "position", _format(value)) from None


def parse_announcement(key: str, field: bytes, value: bytes) -> tuple[str, str, bytes]:
    """Return subject, entry id and payload of a current announcement. Raises KeyConflict."""
    entry_id, _, payload = value.partition(b" ")
    try:
        return field.decode(), _position(entry_id), payload
    except ValueError:
        raise KeyConflict(key, "announcement", _format(field)) from None


def parse_dead_letter(key: str, at: bytes, fields: dict[bytes, bytes]) -> tuple[str, str, bytes]:
    """Return entry id, reason and payload of a dead letter. Raises KeyConflict."""
    try:
        return _position(fields[b"id"]), fields[b"reason"].decode(), fields[b"e"]
    except (KeyError, ValueError):
        raise KeyConflict(key, "dead letter", at.decode()) from None


def _position(value: bytes) -> str:
    text = value.decode("ascii")
    position(text)
    return text


def _format(value: bytes | None) -> str:
    return shorten(repr(value), _LONGEST_SHOWN)
