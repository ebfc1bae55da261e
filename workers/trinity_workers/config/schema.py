"""JSON Schema of a configuration, for editors: each field with its meaning and when it is read."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from msgspec import Struct

from .fields import Field, fields, sections
from .files import BASE
from .rules.table import find_conditions
from .train_config import TrainConfig

_PLACE = re.compile(r"\{(.*?)\}")


def format_meaning(field: Field) -> str:
    """Return a field's meaning, and the conditions under which it is read, in Markdown."""
    conditions = [_PLACE.sub(r"`\1`", text) for text in find_conditions(field.path)]
    if not conditions:
        return field.meaning
    return f"{field.meaning} Read only if {', and if '.join(conditions)}."


def add_meanings(schema: dict[str, Any]) -> dict[str, Any]:
    """Add the meaning of each field to the schema of a configuration, and return it."""
    structs: dict[str, type[Struct]] = {"": TrainConfig, **sections()}
    # msgspec's schema has one definition for each type, wherever it is used.
    uses = Counter(structs.values())
    for section, struct in structs.items():
        properties = schema["$defs"][struct.__name__]["properties"]
        for name, inner in properties.items():
            if field := fields().get(f"{section}.{name}".removeprefix(".")):
                # Where sections share a type, each has conditions of its own.
                inner["description"] = format_meaning(field) if uses[struct] == 1 else field.meaning
    # No field: a file's base is resolved before the configuration is built.
    schema["$defs"][TrainConfig.__name__]["properties"][BASE] = {
        "type": "string",
        "description": "Path of a configuration that this file is laid over.",
    }
    return schema
