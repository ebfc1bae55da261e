"""Mark tests by what their code and their fixtures use: no test is marked by hand."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

SERVER = "tests.support.redis_servers"
"""Module whose servers count as ``server``, although they are processes too."""
NEEDS = {
    "server": (SERVER, "trinity_events.server.embedded"),
    "processes": (
        "subprocess",
        "multiprocessing",
        "os.fork",
        "anyio.open_process",
        "trinity_workers.launch.launcher",
        "trinity_workers.launch.processes",
        "benchmarks.learning.running.perform",
    ),
    "megatron": ("megatron", "mbridge", "tests.support.megatron_ranks"),
}
"""Marker to the modules and functions that it stands for."""
URLS = {"redis_url", "weights_url"}
"""Fixtures that start the session's servers."""
WHOLE_RUNS = {"benchmarks", "crashes", "end_to_end"}
"""Folders whose tests with processes start whole runs."""


def mark_by_needs(items: list[pytest.Item]) -> None:
    """Add the markers of ``pyproject.toml`` to the tests that they fit."""
    for item in items:
        if isinstance(item, pytest.Function):
            for name in _needs(item):
                item.add_marker(name)


def _needs(item: pytest.Function) -> set[str]:
    given = list(item.callspec.params.values()) if hasattr(item, "callspec") else []
    fixtures = _fixtures(item)
    functions = [item.function, *fixtures.values()]
    names = set().union(*(_named(_used(function)) for function in (*functions, *given)))
    if URLS & set(fixtures):
        names.add("server")
    if "megatron" in item.path.stem:
        names.add("megatron")
    # Helpers that know each transport mention Ray: only a test's own words count.
    if "ray_cluster" in item.fixturenames or "ray" in given or _imports_ray(item):
        names.add("ray")
    whole = "processes" in names and item.path.parent.name in WHOLE_RUNS
    if whole or names & {"ray", "megatron"} or "rank_processes" in fixtures:
        names.add("heavy")
    return names


def _imports_ray(item: pytest.Function) -> bool:
    function = _plain(item.function)
    words = set(_words(function.__code__)) if isinstance(function, FunctionType) else set()
    return "ray" in words or "ray" in item.path.stem.split("_")


def _fixtures(item: pytest.Function) -> dict[str, Any]:
    """Return the functions of the fixtures that a test uses, by name and by getfixturevalue."""
    manager = item.session._fixturemanager
    ahead, functions = list(item.fixturenames), {}
    while ahead:
        name = ahead.pop()
        definitions = None if name in functions else manager.getfixturedefs(name, item)
        if not definitions:
            continue
        functions[name] = definitions[-1].func
        ahead += definitions[-1].argnames
        function = _plain(functions[name])
        if isinstance(function, FunctionType) and "getfixturevalue" in function.__code__.co_names:
            ahead += [
                constant for constant in function.__code__.co_consts if isinstance(constant, str)
            ]
    return functions


@cache
def _named(used: frozenset[str]) -> frozenset[str]:
    """Return the markers for what is used."""
    return frozenset(
        name for name, targets in NEEDS.items() if any(_within(used, target) for target in targets)
    )


def _within(used: frozenset[str], target: str) -> bool:
    return any(name == target or name.startswith(f"{target}.") for name in used)


def _used(start: Any) -> frozenset[str]:
    function = _plain(start)
    return _reached(function) if function is not None else frozenset()


@cache
def _reached(start: FunctionType | type) -> frozenset[str]:
    """Return the full names of what a function or class uses, through all code of the tests."""
    seen, ahead, used = {start}, [start], set()
    while ahead:
        names, following = _uses(ahead.pop())
        used |= names
        ahead += [value for value in following if value not in seen]
        seen |= set(following)
    return frozenset(used)


@cache
def _uses(what: FunctionType | type) -> tuple[frozenset[str], tuple[Any, ...]]:
    """Return the full names in its own code, and the functions and classes of tests among them."""
    values: list[Any] = []
    names: set[str] = set()
    if isinstance(what, type):
        members = (getattr(member, "fget", None) or member for member in vars(what).values())
        values += [*members, *what.__bases__]
    else:
        spaces = [what.__globals__]
        for word in _words(what.__code__):
            names.add(word)  # an import within the function
            for space in spaces:
                if word in space:
                    value = space[word]
                    values.append(value)
                    if isinstance(value, ModuleType):
                        names.add(value.__name__)
                        spaces = [*spaces, vars(value)]
        values += [cell.cell_contents for cell in what.__closure__ or () if _is_filled(cell)]
    following = []
    for value in values:
        module = getattr(value, "__module__", None)
        if isinstance(module, str):
            names.add(f"{module}.{getattr(value, '__name__', '')}")
        function = _plain(value)
        if (
            function is not None
            and function.__module__.startswith("tests.")
            and function.__module__ != SERVER
        ):
            following.append(function)
    return frozenset(names), tuple(dict.fromkeys(following))


def _plain(value: Any) -> FunctionType | type | None:
    """Return the function of tests behind decorators, or the class; None of all else."""
    value = getattr(getattr(value, "hypothesis", None), "inner_test", value)
    value = getattr(value, "_get_wrapped_function", lambda: value)()  # a fixture
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    try:
        value = inspect.unwrap(value)
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, FunctionType | type) else None


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _words(code: CodeType) -> Iterator[str]:
    """Yield the names of globals, attributes and imports in the code and in what it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words(constant)
