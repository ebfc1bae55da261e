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

from .errors import ObjectUnusable

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
        ObjectUnusable: if there is no such object, or its module cannot be imported.
    """
    if ":" in name:
        return _attribute(name, kind, folder)
    names = dict(built_in or {})
    if name in names:
        return _attribute(names[name], kind, folder)
    points = {point.name: point for point in entry_points(group=group)} if group else {}
    if name not in points:
        raise _unknown(name, kind, sorted({*names, *points}))
    try:
        return points[name].load()
    except Exception as error:
        raise ObjectUnusable(kind, name, "load", reason=_format_error(error)) from error


def refused_arguments(function: Any, count: int) -> str | None:
    """Return why a function does not take so many arguments; None if nothing speaks against it."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        return str(error)
    except ValueError:  # written in C, without a signature
        return None
    return None


def _unknown(name: str, kind: str, choices: list[str]) -> ObjectUnusable:
    nearest = _find_nearest(name, choices)
    return ObjectUnusable(kind, name, "unknown", choices=tuple(choices), nearest=nearest)


def _attribute(name: str, kind: str, folder: Path) -> Any:
    place, _, attribute = name.partition(":")
    if not place or not attribute:
        raise ObjectUnusable(kind, name, "form")
    load = _from_file if place.endswith(".py") else _import
    module = load(place, folder, kind, name)
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise ObjectUnusable(
            kind, name, "attribute", place, nearest=_find_nearest(attribute, vars(module))
        ) from None


def _find_nearest(name: str, names: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(name, list(names), n=1)), None)


def _from_file(place: str, folder: Path, kind: str, name: str) -> ModuleType:
    path = (folder / place).resolve()
    if not path.is_file():
        raise ObjectUnusable(kind, name, "file", str(path))
    _search(path.parent)
    module_name = _module_name(path)
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before it runs, as an import does: dataclasses look their module up by its name.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        # A second attempt must not find half of a module.
        del sys.modules[module_name]
        # A script without a main guard may end with sys.exit().
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ObjectUnusable(
            kind, name, "import", str(path), reason=_format_error(error)
        ) from error
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


def _import(place: str, folder: Path, kind: str, name: str) -> ModuleType:
    _search(folder.resolve())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # The module itself is missing, or one that it imports: two errors for the user.
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise ObjectUnusable(
                kind, name, "import", place, reason=_format_error(error)
            ) from error
        raise ObjectUnusable(kind, name, "module", error.name) from None
    except Exception as error:
        raise ObjectUnusable(kind, name, "import", place, reason=_format_error(error)) from error


def _search(folder: Path) -> None:
    """Let a user's module import the modules beside it, after all installed ones."""
    if str(folder) not in sys.path:
        # Last: a user's file must not hide an installed module of its name.
        sys.path.append(str(folder))


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
