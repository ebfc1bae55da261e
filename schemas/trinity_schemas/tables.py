"""Contract as Markdown tables, taken from its JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from .events import ANNOUNCEMENT_TYPES, EVENT_TYPES, SENT_BY, event_tag
from .identity import REPORTER_ROLE
from .schemas import Schema, components

_REF = "#"


def event_tables() -> str:
    """Return the Markdown: events and their senders, their fields, and the fields' structs."""
    tables = _Tables(components(_REF + "{name}"))
    lines = ["| event | from | stream | says |", "|---|---|---|---|"]
    for event in EVENT_TYPES:
        tag = event_tag(event)
        says = tables.get_description(event.__name__).partition("\n")[0]
        lines.append(f"| [`{tag}`](#{tag}) | {SENT_BY[event]} | {_stream(event)} | {says} |")
    for event in EVENT_TYPES:
        lines += tables.section(event_tag(event), event.__name__, 3)
    names = {event.__name__ for event in EVENT_TYPES}
    lines += ["", "### What events are made of"]
    for name in sorted(tables.schemas.keys() - names):
        lines += tables.section(name, name, 4)
    lines += ["", "## Words", "", "| word | text that matches |", "|---|---|"]
    lines += [f"| {word} | `{pattern}` |" for word, pattern in sorted(tables.words.items())]
    return "\n".join(lines)


def _stream(event: type[Struct]) -> str:
    if event in ANNOUNCEMENT_TYPES:
        return "announcements"
    return "reports, then events" if SENT_BY[event] == REPORTER_ROLE else "events"


class _Tables:
    """Renderer of structs, which collects the words that it uses for patterns."""

    def __init__(self, schemas: dict[str, Schema]) -> None:
        self.schemas = schemas
        self.words: dict[str, str] = {}

    def get_description(self, name: str) -> str:
        return str(self.schemas[name]["description"]).replace("``", "`")

    def section(self, title: str, name: str, level: int) -> Iterator[str]:
        schema = self.schemas[name]
        yield from ("", f"{'#' * level} {title}", "", self.get_description(name))
        # The tag is the title of an event's section.
        fields = {name: field for name, field in schema["properties"].items() if name != "type"}
        if fields:
            yield from ("", "| field | type | default | meaning |", "|---|---|---|---|")
        for field_name, field in fields.items():
            required = field_name in schema["required"]
            default = "required" if required else _default(field["default"])
            meaning = self._meaning(field)
            yield f"| `{field_name}` | {self._type(field)} | {default} | {meaning} |"

    def _meaning(self, field: Schema) -> str:
        """Return the description of the field, or else of its type."""
        inner = _without_null(field)
        if "description" in field:
            return str(field["description"])
        if "$ref" in inner:
            return self.get_description(inner["$ref"].removeprefix(_REF)).partition("\n")[0]
        return str(inner.get("description", ""))

    def _type(self, field: Schema) -> str:  # noqa: PLR0911
        match _without_null(field):
            case {"$ref": str(ref)}:
                name = ref.removeprefix(_REF)
                return f"[{name}](#{name.lower()})"
            case {"discriminator": _}:
                return "one of the events above"
            case {"anyOf": list(forms)}:
                return " or ".join(sorted(map(self._type, forms)))
            case {"enum": list(values)}:
                return ", ".join(f"`{value}`" for value in values)
            case {"type": "array", "items": dict(items)}:
                return f"list of {self._type(items)}"
            case {"type": "object", "additionalProperties": dict(values)}:
                return f"map of text to {self._type(values)}"
            case {"type": "string", "pattern": str(pattern), "title": str(word)}:
                self.words[word] = pattern
                return word
            case {"type": "string", "maxLength": int(longest)}:
                return f"text of at most {longest:,} characters"
            case {"type": "integer", "minimum": int(least), "maximum": int(most)}:
                return f"integer, {least:,} to {_power(most)}"
            case {"type": "number", "minimum": int(least)}:
                return f"number, {least:,} or more"
            case {"type": str(plain)}:
                return plain
            # A field of a new form fails the generator, before a page lacks it.
            case other:
                raise ValueError(f"no words for the schema {other}")


def _without_null(field: Schema) -> Schema:
    options = [option for option in field.get("anyOf", ()) if option != {"type": "null"}]
    return options[0] if len(options) == 1 else field


def _default(value: Any) -> str:
    is_empty = value in (None, "", (), [], {}) or (
        isinstance(value, dict) and value.get("length") == 0
    )
    return "none" if is_empty else f"`{value}`"


def _power(number: int) -> str:
    return f"2^{number.bit_length() - 1}" if number.bit_count() == 1 else f"{number:,}"
