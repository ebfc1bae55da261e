"""Contract as JSON Schema, taken from the structs, the same on every machine."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from .envelope import Envelope
from .events import EVENT_TYPES, event_tag
from .manifest import WeightManifest
from .rollouts import Experience, ExperienceReference, RolloutRequest

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schemas() -> dict[str, Schema]:
    """Return the documents by name: the envelope, each event by its tag, and other messages."""
    types = {"envelope": Envelope} | {event_tag(event): event for event in EVENT_TYPES}
    types |= {"weight-manifest": WeightManifest}
    types |= {"rollout-request": RolloutRequest, "experience": Experience}
    types |= {"experience-reference": ExperienceReference}
    return {name: {"$schema": DIALECT} | tidy(msgspec.json.schema(t)) for name, t in types.items()}


def components(ref_template: str, *others: type) -> dict[str, Schema]:
    """Return the schemas of all messages by struct name; they refer to each other by template."""
    types = [Envelope, RolloutRequest, Experience, ExperienceReference, *EVENT_TYPES, *others]
    _, schemas = msgspec.json.schema_components(types, ref_template=ref_template)
    return {name: tidy(schema) for name, schema in schemas.items()}


def tidy(schema: Schema) -> Schema:
    """Remove the indentation of docstrings, as Python 3.13 and later do by themselves."""
    for value in schema.values():
        if isinstance(value, dict):
            tidy(value)
    # A property may be called "description": then it is a schema, not a text.
    if isinstance(schema.get("description"), str):
        schema["description"] = inspect.cleandoc(schema["description"])
    return schema
