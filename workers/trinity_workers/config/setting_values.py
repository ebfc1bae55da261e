"""Values of a configuration's settings by their paths, as the log holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from ..rules import NAME
from .fields import fields
from .train_config import TrainConfig


class Setting(NamedTuple):
    """Setting with its value in one configuration."""

    path: str
    """Path in the tables; NAME stands for the name of a section that a user names."""
    keys: tuple[str, ...]
    """Names of the sections around it, and its own."""
    value: Any

    @property
    def name(self) -> str:
        """Return the setting's path in its configuration."""
        return ".".join(self.keys)


def get_settings(values: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield every setting of a configuration, in order; an absent one has its default."""
    defaults = to_values(TrainConfig())
    for path, field in fields().items():
        # NAME stands for each section that the configuration names there.
        before, named, name_below = path.partition(f".{NAME}.")
        keys = tuple(before.split("."))
        if not named:
            yield Setting(path, keys, _find(values, keys, descend(defaults, keys)))
            continue
        # As the log has it: a tuple is a list there, and would differ from itself.
        default = msgspec.json.decode(msgspec.json.encode(field.default))
        for name in _find(values, keys, descend(defaults, keys)):
            below = (*keys, name, *name_below.split("."))
            yield Setting(path, below, _find(values, below, default))


def _find(values: Any, keys: Iterable[str], default: Any) -> Any:
    """Return the value below nested keys; the default if one of them is absent."""
    for key in keys:
        # The log's writer may be of another version.
        if not isinstance(values, Mapping) or key not in values:
            return default
        values = values[key]
    return values


def to_values(section: Struct) -> dict[str, Any]:
    """Return a section as the log holds it: mappings, lists and plain values."""
    values = {name: getattr(section, name) for name in section.__struct_fields__}
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
    return decoded


def descend(values: Any, keys: Iterable[str]) -> Any:
    """Return the value below nested keys."""
    for key in keys:
        values = values[key]
    return values
