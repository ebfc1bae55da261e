"""Python objects by name: an entry point, `module:attribute` or `./file.py:attribute`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import reduce
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from .base import TaskError

_PACKAGE = "trinity_user"
"""Package of the modules of users' files whose names are other modules'."""


def load_object(
    name: str,
    *,
    kind: str = "object",
    group: str | None = None,
    built_in: Mapping[str, str] | None = None,
    folder: Path = Path(),
) -> Any:
    """Return the object of that name.

    Args:
        name: `module:attribute`, `./file.py:attribute`, or a name without a colon, which is
            built in or an entry point.
        kind: Kind of object, for messages.
        group: Group of entry points.
        built_in: Names that are known without an entry point, with their objects' names.
        folder: Directory from which files are found, and modules imported.

    Raises:
        TaskError: if there is no such object, or its module cannot be imported.
    """
    if ":" in name:
        return _attribute(name, kind, folder)
    names = dict(built_in or {})
    if name in names:
        return _attribute(names[name], kind, folder)
    points = {point.name: point for point in entry_points(group=group)} if group else {}
    if name not in points:
        raise TaskError(_unknown(name, kind, sorted({*names, *points})))
    try:
        return points[name].load()
    except Exception as error:
        raise TaskError(f"{kind} {name!r} cannot be loaded: {_format_error(error)}") from error


def refused_arguments(function: Any, count: int) -> str | None:
    """Return why a function does not take so many arguments; None if nothing speaks against it."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        return str(error)
    except ValueError:  # written in C, without a signature
        return None
    return None


def _unknown(name: str, kind: str, choices: list[str]) -> str:
    near = get_close_matches(name, choices, n=1)
    choice = f"did you mean {near[0]!r}? " if near else ""
    listed = f"choose one of {', '.join(choices)}, or name your own" if choices else "name your own"
    return f"unknown {kind} {name!r}: {choice}{listed} as module:attribute or ./file.py:attribute"


def _attribute(name: str, kind: str, folder: Path) -> Any:
    place, _, attribute = name.partition(":")
    if not place or not attribute:
        raise TaskError(f"{kind} {name!r} is neither module:attribute nor ./file.py:attribute")
    module = _from_file(folder / place, kind) if place.endswith(".py") else _import(place, folder)
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise TaskError(
            f"{place} has no {attribute!r}{_nearest(attribute, vars(module))}"
        ) from None


def _nearest(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, list(names), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _from_file(path: Path, kind: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise TaskError(f"there is no file {path} with the {kind}")
    _search(path.parent)
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise TaskError(f"{path} cannot be imported: {_format_error(error)}") from error
    return module


def _module_name(path: Path) -> str:
    """Return the name of a file's module, by which other processes find it too.

    multiprocessing sends functions by the name of their module. Where another module has the name
    of the file, such as Python's for a user's json.py, the module gets a name of its own. Processes
    that are forked find it by that; those that are spawned do not.
    """
    if path.stem.isidentifier():
        try:
            spec = importlib.util.find_spec(path.stem)
        except ValueError:  # a module without a spec, such as __main__
            spec = None
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path:
            return path.stem
    if _PACKAGE not in sys.modules:  # pickle imports the package of a module
        package = ModuleType(_PACKAGE)
        package.__path__ = []
        sys.modules[_PACKAGE] = package
    return f"{_PACKAGE}.{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"


def _import(name: str, folder: Path) -> ModuleType:
    _search(folder.resolve())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise TaskError(f"module {name} cannot be imported: {_format_error(error)}") from error
        raise TaskError(
            f"there is no module {error.name}: install it, or name its file as ./file.py:attribute"
        ) from None
    except Exception as error:
        raise TaskError(f"module {name} cannot be imported: {_format_error(error)}") from error


def _search(folder: Path) -> None:
    """Let a user's module import the modules beside it, after all installed ones."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
