"""Signatures of the public interface, one text for each module that docs/api.md covers.

Usage: python -m tests.support.signatures

It writes them to ``tests/snapshots/signatures``. A difference there is a change of the interface:
docs/releases.md says what a version may change, and how a name goes.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/api.md"
FOLDER = ROOT / "tests/snapshots/signatures"
_OBJECT = re.compile(r"^::: (\S+)\n((?: {4}.*\n)*)", re.MULTILINE)
_PACKAGES = ("trinity_events", "trinity_workers", "trinity_schemas")


def main() -> None:
    """Write the texts of all modules, and remove those of modules that left the page."""
    FOLDER.mkdir(exist_ok=True)
    texts = format_modules()
    for path in FOLDER.glob("*.txt"):
        if path.stem not in texts:
            path.unlink()
    for module, text in texts.items():
        (FOLDER / f"{module}.txt").write_text(text)


def format_modules() -> dict[str, str]:
    """Return module to the signatures of what the page has of it, a line each."""
    lines: defaultdict[str, list[str]] = defaultdict(list)
    for path, members in read_page(PAGE.read_text()):
        module, name = find_module(path)
        if name:
            lines[module.__name__] += format_object(name, getattr(module, name), members)
        else:
            for public in sorted(get_public_names(module)):
                lines[module.__name__] += format_object(public, getattr(module, public), None)
    return {module: "\n".join(rows) + "\n" for module, rows in lines.items()}


def read_page(text: str) -> Iterator[tuple[str, list[str] | None]]:
    """Yield each object of the page and its members; None stands for all public ones."""
    for match in _OBJECT.finditer(text):
        options = yaml.safe_load(match[2]) or {}
        yield match[1], options.get("options", {}).get("members")


def find_module(path: str) -> tuple[ModuleType, str]:
    """Return the module of a dotted path and the name in it, which is empty for a module."""
    try:
        return import_module(path), ""
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return import_module(module), name


def get_public_names(module: ModuleType) -> list[str]:
    """Return the names that a module defines for others."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def format_object(name: str, value: Any, members: list[str] | None) -> Iterator[str]:
    """Yield the lines of a function or of a class with its members."""
    if not inspect.isclass(value):
        yield f"{name}{format_signature(value)}"
        return
    bases = [base.__name__ for base in value.__bases__]
    yield f"class {name}({', '.join(bases)}): {name}{format_signature(value)}"
    if issubclass(value, BaseException):
        return  # its attributes are its parameters
    for member in members if members is not None else find_members(value):
        yield f"    {format_member(value, member)}"


def find_members(kind: type) -> list[str]:
    """Return the public members of a class that the project itself defines, in order."""
    return sorted(
        {
            name
            for base in kind.__mro__
            if base.__module__.startswith(_PACKAGES)
            for name in vars(base)
            if not name.startswith("_")
        }
    )


def format_member(kind: type, name: str) -> str:
    """Format a method, a property or a field."""
    value = inspect.getattr_static(kind, name)
    if isinstance(value, property):
        return f"{name}: property{format_signature(value.fget)}"
    if isinstance(value, cached_property):
        return f"{name}: property{format_signature(value.func)}"
    if isinstance(value, classmethod | staticmethod):
        return f"{name}: {type(value).__name__}{format_signature(value.__func__)}"
    if inspect.isfunction(value):
        return f"{name}{format_signature(value)}"
    for base in kind.__mro__:
        annotation = vars(base).get("__annotations__", {}).get(name)
        if annotation is not None:
            return f"{name}: {_format_annotation(annotation)}"
    return f"{name}: {type(value).__name__}"


def format_signature(value: Any) -> str:
    """Format parameters with kinds, types and defaults, and the type of the result."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # an exception without parameters of its own has none that Python tells
        return "()"
    rows = []
    # Ray adds it to the methods of a class once that is an actor somewhere in the process.
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.name != "_ray_trace_ctx"
    ]
    kinds = [parameter.kind for parameter in parameters]
    for place, parameter in enumerate(parameters):
        before = kinds[:place]
        if parameter.kind is parameter.KEYWORD_ONLY and not {
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        } & set(before):
            rows.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        row = f"{stars}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            row += f": {_format_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            row += f" = {_format_default(parameter.default)}"
        rows.append(row)
        after = kinds[place + 1 : place + 2]
        if parameter.kind is parameter.POSITIONAL_ONLY and after != [parameter.POSITIONAL_ONLY]:
            rows.append("/")
    result = signature.return_annotation
    arrow = "" if result in (signature.empty, None, "None") else f" -> {_format_annotation(result)}"
    return f"({', '.join(rows)}){arrow}"


def _format_default(value: Any) -> str:
    """Format a default; an object without a text of its own is named by its class."""
    if inspect.isfunction(value):
        return value.__name__
    text = repr(value)
    return f"{type(value).__name__}()" if " object at 0x" in text else text


def _format_annotation(annotation: Any) -> str:
    """Format a type as it is written, quoted or not."""
    if isinstance(annotation, str):
        return annotation.strip("'\"")
    return inspect.formatannotation(annotation)


if __name__ == "__main__":
    main()
