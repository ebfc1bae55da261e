"""Fields of a run's configuration: path, type, default and meaning of each, from its types."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Struct
from msgspec import inspect as types

from ..rules import NAME
from .train_config import TrainConfig


class Field(NamedTuple):
    """One field of the configuration."""

    path: str
    type: types.Type
    default: Any
    meaning: str

    @property
    def optional(self) -> bool:
        """Return True if the field may be null."""
        return isinstance(self.type, types.UnionType) and self.type.includes_none

    @property
    def kind(self) -> types.Type:
        """Type of the field without null."""
        if isinstance(self.type, types.Metadata):
            return self.type.type
        if not isinstance(self.type, types.UnionType):
            return self.type
        return next(member for member in self.type.types if not isinstance(member, types.NoneType))

    @property
    def choices(self) -> tuple[str, ...]:
        """Names that the field takes, in the order of their declaration; empty for any value."""
        return _choices(_annotation(self.path)) if isinstance(self.kind, types.LiteralType) else ()

    @property
    def allowed(self) -> str:
        """Say which values the field takes."""
        allowed = "one of " + ", ".join(self.choices) if self.choices else _allowed(self.kind)
        return allowed + (" or null" if self.optional else "")

    def converted(self, value: Any) -> Any:
        """Return the value as the field holds it. Raises ValueError if it is not allowed."""
        if value is None and self.optional:
            return None
        # msgspec takes infinity as above any open bound.
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is not finite")
        # YAML and TOML have a whole number for 1, and to Python a bool is one too.
        whole = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(self.kind, types.FloatType) and whole:
            value = float(value)
        return msgspec.convert(value, _annotation(self.path))


@cache
def sections() -> dict[str, type[Struct]]:
    """Return the configuration's sections by path, such as ``algorithm.kl``, in order."""
    return dict(_sections_of(TrainConfig, ""))


@cache
def fields() -> dict[str, Field]:
    """Return every field of the configuration by its path, such as ``sync.interval``."""
    settings = list(_read(TrainConfig, ""))
    for name, section in sections().items():
        settings += _read(section, f"{name}.")
    return {setting.path: setting for setting in settings}


@cache
def collections() -> tuple[str, ...]:
    """Return the paths of the fields that hold sections by name, such as ``evaluation.sets``."""
    suffix = f".{NAME}"
    return tuple(path.removesuffix(suffix) for path in sections() if path.endswith(suffix))


def expand_paths(table: Mapping[str, str]) -> frozenset[str]:
    """Return the paths of a table that has the names of each section's fields in one text."""
    return frozenset(
        f"{section}.{name}".removeprefix(".")
        for section, names in table.items()
        for name in names.split()
    )


def general_path(path: str) -> str:
    """Return a path with NAME in the place of the name that a user gave to a section."""
    for prefix in collections():
        if path.startswith(f"{prefix}."):
            _, *rest = path.removeprefix(f"{prefix}.").split(".")
            return ".".join([prefix, NAME, *rest])
    return path


def _sections_of(struct: type[Struct], prefix: str) -> Iterator[tuple[str, type[Struct]]]:
    for field in _fields_of(struct):
        if isinstance(field.type, types.StructType):
            yield prefix + field.name, field.type.cls
            yield from _sections_of(field.type.cls, f"{prefix}{field.name}.")
        elif (named := _named_sections(field.type)) is not None:
            yield f"{prefix}{field.name}.{NAME}", named


def _named_sections(kind: types.Type) -> type[Struct] | None:
    """Return the type of the sections that a field holds by name; None for other fields."""
    if isinstance(kind, types.DictType) and isinstance(kind.value_type, types.StructType):
        return kind.value_type.cls
    return None


def _read(struct: type[Struct], prefix: str) -> list[Field]:
    meanings = _meanings(struct.__module__)[struct.__name__]
    # Of an instance, since defaults of msgspec may be factories.
    defaults = struct()
    return [
        Field(prefix + field.name, field.type, getattr(defaults, field.name), meanings[field.name])
        for field in _fields_of(struct)
        if not isinstance(field.type, types.StructType) and _named_sections(field.type) is None
    ]


def _fields_of(struct: type[Struct]) -> tuple[types.Field, ...]:
    described = types.type_info(struct)
    assert isinstance(described, types.StructType)
    return described.fields


def _choices(annotation: Any) -> tuple[str, ...]:
    choices: list[str] = []
    for argument in get_args(annotation):
        # A literal may be made of others, such as TransportName.
        if get_args(argument):
            choices += _choices(argument)
        elif isinstance(argument, str):
            choices.append(argument)
    return tuple(choices)


def _annotation(path: str) -> Any:
    section, _, name = path.rpartition(".")
    struct = sections()[section] if section else TrainConfig
    # With the bounds, which are extras of the types; annotations are texts in these modules.
    return get_type_hints(struct, include_extras=True)[name]


@cache
def _meanings(module: str) -> dict[str, dict[str, str]]:
    """Docstrings of the attributes of each class, which follow them in the module's source."""
    # Python keeps no docstrings of attributes.
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text())
    meanings: dict[str, dict[str, str]] = {}
    for struct in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        meanings[struct.name] = {
            # One line, for helps, tables and editors.
            field.target.id: " ".join(str(docstring.value.value).split())
            for field, docstring in zip(struct.body, struct.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(docstring, ast.Expr)
            and isinstance(docstring.value, ast.Constant)
        }
    return meanings


def _allowed(kind: types.Type) -> str:
    match kind:
        case types.IntType():
            return "an integer" + _bounds(kind)
        case types.FloatType():
            return "a number" + _bounds(kind)
        case types.BoolType():
            return "true or false"
        case types.VarTupleType():
            return f"a list, each {_allowed(kind.item_type)}"
        case types.DictType():
            return "a mapping of names to values"
    return "text"


def _bounds(kind: types.IntType | types.FloatType) -> str:
    if kind.le is not None:
        lower = f"above {kind.gt:g}, up" if kind.ge is None else f"from {kind.ge}"
        return f" {lower} to {kind.le}"
    if kind.lt is not None:
        lower = f"above {kind.gt:g} and" if kind.ge is None else f"from {kind.ge} to"
        return f" {lower} below {kind.lt:g}"
    if kind.gt is not None:
        return f" above {kind.gt:g}"
    return "" if kind.ge is None else f" of at least {kind.ge}"
