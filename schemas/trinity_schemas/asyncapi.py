"""Contract as one AsyncAPI 3.0 document: streams, their messages, and the senders' roles."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from .envelope import SCHEMA_VERSION
from .events import ANNOUNCEMENT_TYPES, EVENT_TYPES, REPORT_TYPES, SENT_BY, event_tag
from .identity import REPORTER_ROLE
from .keys import RunKeys
from .manifest import WeightManifest
from .rollouts import Experience, ExperienceReference, RolloutRequest
from .schemas import components

Object = dict[str, Any]
MSGPACK = "application/msgpack"
_SCHEMAS = "#/components/schemas/"
_PUBLISHED = tuple(event for event in EVENT_TYPES if event not in ANNOUNCEMENT_TYPES)
_REPORTS = tuple(event for event in EVENT_TYPES if event in REPORT_TYPES)
_FOLLOWED = ("EpochOpened", "EpochClosed", "TrainingEnded", "PublicationStarted", "VersionResent")
_SAMPLES = [Experience.__name__, ExperienceReference.__name__]
_DEAD_LETTER = "DeadLetter"

# Redis wants the braces for its hash tag and AsyncAPI for its parameter: the parameter is the
# run id with its braces.
_KEYS = RunKeys.of("run")
_RUN = {
    "description": "The run's id inside literal braces, which make it a Redis hash tag.",
    "examples": ["{grpo-7b}"],
}


def asyncapi() -> Object:
    """Return the document; every reference in it resolves within it."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Trinity Events",
            "version": str(SCHEMA_VERSION),
            "description": (
                "Streams of one run, on Redis 7.0 or newer. Each entry has one field, `e`, "
                "with the message as MessagePack; a dead letter also has `id` and `reason`."
            ),
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": MSGPACK,
        "channels": _channels(),
        "operations": _operations(),
        "components": {
            "messages": _messages(),
            # No stream has the manifest, but its changes are to be seen in the tracked document.
            "schemas": components(_SCHEMAS + "{name}", WeightManifest),
        },
    }


def _channels() -> Object:
    def channel(address: str, description: str, messages: list[str]) -> Object:
        return {
            "address": address,
            "description": description,
            "parameters": {"run": _RUN},
            "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
        }

    return {
        "events": channel(
            _KEYS.events,
            "Events of trainers, workers and the reducer, and accepted reports of explorers.",
            _names(_PUBLISHED),
        ),
        "reports": channel(
            _KEYS.reports,
            "Reports of explorers. The leading reducer checks each, and copies it to the events "
            "or makes it a dead letter.",
            _names(_REPORTS),
        ),
        "announcements": channel(
            _KEYS.announcements,
            "Announcements of the reducer, each exactly once; subscribers listen here.",
            _names(ANNOUNCEMENT_TYPES),
        ),
        "experiences": channel(
            _KEYS.experiences,
            "Experiences from explorers to the trainer, or references to them, one entry a sample. "
            "An entry is deleted once it was used.",
            _SAMPLES,
        ),
        "rollouts": channel(
            _KEYS.rollouts,
            "Requests of the trainer for the samples of prompts. Explorers are members of one "
            "consumer group; an answered request is deleted.",
            [RolloutRequest.__name__],
        ),
        "deadLetters": channel(
            _KEYS.dead,
            "Entries of the events that could not be decoded, and reports that were refused.",
            [_DEAD_LETTER],
        ),
    }


def _operations() -> Object:
    def operation(role: str, action: str, channel: str, messages: list[str]) -> Object:
        of_channel = f"#/channels/{channel}"
        return {
            "action": action,
            "channel": {"$ref": of_channel},
            "tags": [{"name": role}],
            "messages": [{"$ref": f"{of_channel}/messages/{name}"} for name in messages],
        }

    published, announced = _names(_PUBLISHED), _names(ANNOUNCEMENT_TYPES)
    samples, requests = _SAMPLES, [RolloutRequest.__name__]
    roles = dict.fromkeys(SENT_BY[event] for event in _PUBLISHED)
    operations = {
        f"{role}SendsEvents": operation(
            role, "send", "events", _names(tuple(e for e in _PUBLISHED if SENT_BY[e] == role))
        )
        for role in roles
        if role != REPORTER_ROLE
    }
    return operations | {
        "explorerSendsReports": operation(REPORTER_ROLE, "send", "reports", _names(_REPORTS)),
        "reducerReceivesReports": operation("reducer", "receive", "reports", _names(_REPORTS)),
        "reducerReceivesEvents": operation("reducer", "receive", "events", published),
        "reducerSendsAnnouncements": operation("reducer", "send", "announcements", announced),
        "reducerSendsDeadLetters": operation("reducer", "send", "deadLetters", [_DEAD_LETTER]),
        "explorerSendsExperiences": operation("explorer", "send", "experiences", samples),
        "trainerReceivesExperiences": operation("trainer", "receive", "experiences", samples),
        "trainerSendsRollouts": operation("trainer", "send", "rollouts", requests),
        "explorerReceivesRollouts": operation("explorer", "receive", "rollouts", requests),
        "workerReceivesAnnouncements": operation(
            "worker", "receive", "announcements", ["SaveGranted", "VersionRetired"]
        ),
        "explorerReceivesAnnouncements": operation(
            "explorer", "receive", "announcements", ["StepReady", *_FOLLOWED]
        ),
        "subscriberReceivesEvents": operation("subscriber", "receive", "events", published),
        "subscriberReceivesAnnouncements": operation(
            "subscriber", "receive", "announcements", announced
        ),
    }


def _messages() -> Object:
    def message(name: str, docstring: str | None, payload: Object) -> Object:
        summary = (docstring or "").partition("\n")[0]
        return {"name": name, "summary": summary, "contentType": MSGPACK, "payload": payload}

    messages = {
        event.__name__: message(event_tag(event), event.__doc__, _in_envelope(event))
        for event in EVENT_TYPES
    }
    for message_type in (Experience, ExperienceReference, RolloutRequest):
        name = message_type.__name__
        messages[name] = message(name, message_type.__doc__, {"$ref": _SCHEMAS + name})
    # Its bytes are those of the sender and need not be MessagePack.
    letter = message(
        _DEAD_LETTER, "An entry that could not be decoded, with its bytes unchanged.", {}
    )
    letter["contentType"] = "application/octet-stream"
    letter["headers"] = {
        "type": "object",
        "required": ["id", "reason"],
        "properties": {
            "id": {"type": "string", "description": "Id of the entry in the events."},
            "reason": {"type": "string", "description": "Reason why it could not be decoded."},
        },
    }
    return messages | {_DEAD_LETTER: letter}


def _in_envelope(event: type[Struct]) -> Object:
    one_event = {"type": "object", "properties": {"event": {"$ref": _SCHEMAS + event.__name__}}}
    return {"allOf": [{"$ref": _SCHEMAS + "Envelope"}, one_event]}


def _names(types: tuple[type[Struct], ...]) -> list[str]:
    return [event.__name__ for event in types]
