"""State of a run as JSON: all times in seconds, moments since 1970."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ..analysis.causes import Cause
from ..core import MonitorState
from ..core.handlers.waits import open_waits, remaining_seconds

_OF_RUN = ("opened_at", "closed_at")
_OF_EXPLORER = ("applied_at", "heard_at", "requested_at")


def state_as_json(state: MonitorState) -> dict[str, Any]:
    """Return the state as plain dictionaries and lists, with seconds for its milliseconds."""
    built: dict[str, Any] = msgspec.to_builtins(state, str_keys=True)
    _in_seconds(built, *_OF_RUN)
    learning = built.get("learning", {})
    if "step_times" in learning:
        learning["step_times"] = [seconds(at) for at in learning["step_times"]]
    for wait in built.get("waits", {}).values():
        _in_seconds(wait, "since", "heard_at")
    for explorer in built.get("explorers", {}).values():
        _in_seconds(explorer, *_OF_EXPLORER)
        _in_seconds(explorer.get("pause") or {}, "since")
    for error in built.get("reward_errors", {}).values():
        _in_seconds(error, "at")
    for attempt in built.get("attempts", {}).values():
        _in_seconds(attempt, "since")
    for step in built.get("steps", {}).values():
        if step.get("version") is not None:
            _in_seconds(step["version"], "opened_at")
        for kind in step.get("kinds", {}).values():
            _in_seconds(kind, "committed_at")
            for slot in kind.get("slots", {}).values():
                for attempts in (slot.get("waiting", {}), slot.get("running", {})):
                    _in_seconds(attempts, *attempts)
    return built


def fields_as_json(state: MonitorState, names: Iterable[str]) -> dict[str, Any]:
    """Return some fields of the state as JSON, also those that :func:`state_as_json` omits."""
    encoded = dict(zip(state.__struct_encode_fields__, state.__struct_fields__, strict=True))
    own = {encoded[name] for name in names if name in encoded} | {"run_id"}
    # A state of these fields alone: the others may be large, and are not built.
    chosen = {name: getattr(state, name) for name in own}
    built = state_as_json(MonitorState(**chosen))
    return {
        name: built[name]
        if name in built
        else msgspec.to_builtins(getattr(state, encoded[name]), str_keys=True)
        for name in names
        if name in encoded
    }


def waits_as_json(state: MonitorState, now: int) -> dict[str, Any]:
    """Return the waits that are open at a moment, as the item ``waits``; nothing without any."""
    # By identity: two waits may be equal.
    shown = {id(wait) for wait in open_waits(state, now)}
    built = fields_as_json(state, ("waits",))["waits"]
    waits = {
        name: built[name]
        | {
            "seconds": max(0, now - wait.since) / 1000,
            "seconds_left": remaining_seconds(wait, now),
        }
        for name, wait in state.waits.items()
        if id(wait) in shown
    }
    return {"waits": waits} if waits else {}


def causes_as_json(causes: Iterable[Cause], now: int) -> dict[str, Any]:
    """Return the causes of a standstill as the item ``causes``; nothing without any."""
    built = []
    for cause in causes:
        fields = msgspec.to_builtins(cause)
        if cause.since is not None:
            fields |= {"since": cause.since / 1000, "seconds": max(0, now - cause.since) / 1000}
        built.append(fields)
    return {"causes": built} if built else {}


def seconds(milliseconds: int | None) -> float | None:
    """Return a moment in seconds since 1970."""
    return None if milliseconds is None else milliseconds / 1000


def _in_seconds(fields: dict[str, Any], *names: str) -> None:
    for name in names:
        if name in fields:
            fields[name] = seconds(fields[name])
