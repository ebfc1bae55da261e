"""Delays that a test plants in the processes of a run, and the times at which they happened.

A folder on the path of the processes has a module that Python imports at its start. It wraps
functions after their modules were imported: each call sleeps first, and its times are noted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_MODULE = """
import functools, importlib.abc, importlib.machinery, inspect, os, sys, time

DELAYS, FILE = {delays!r}, {file!r}


def note(function, began):
    line = f"{{function}} {{began}} {{time.time()}}\\n"
    descriptor = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def wrap(name, function):
    seconds = DELAYS[name]
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def planted(*args, **options):
            import anyio

            began = time.time()
            try:
                await anyio.sleep(seconds)
                return await function(*args, **options)
            finally:
                note(name, began)

    else:

        @functools.wraps(function)
        def planted(*args, **options):
            began = time.time()
            try:
                time.sleep(seconds)
                return function(*args, **options)
            finally:
                note(name, began)

    return planted


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        functions = [function for function in DELAYS if function.startswith(f"{{name}}:")]
        if not functions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for function in functions:
                *owners, last = function.partition(":")[2].split(".")
                owner = functools.reduce(getattr, owners, module)
                setattr(owner, last, wrap(function, getattr(owner, last)))

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""


class Interval(NamedTuple):
    """Time of a call, in Unix seconds."""

    began: float
    ended: float


class PlantedDelays:
    """Delays of functions in all processes that get their environment.

    Args:
        folder: Folder for the module and the notes.
        delays: Function, ``module:attribute``, to the seconds that each call of it sleeps.
    """

    def __init__(self, folder: Path, delays: dict[str, float]) -> None:
        folder.mkdir()
        self._folder = folder
        self._file = folder / "calls"
        text = _MODULE.format(delays=delays, file=str(self._file))
        (folder / "sitecustomize.py").write_text(text)

    def plant(self, env: dict[str, str]) -> dict[str, str]:
        """Return an environment with the delays."""
        path = [str(self._folder), env.get("PYTHONPATH", "")]
        return env | {"PYTHONPATH": os.pathsep.join(filter(None, path))}

    def read_calls(self, function: str) -> list[Interval]:
        """Return the times of all calls of a function."""
        return [
            Interval(float(began), float(ended))
            for name, began, ended in map(str.split, self._file.read_text().splitlines())
            if name == function
        ]


def measure_union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the seconds in which at least one interval was under way."""
    total, until = 0.0, 0.0
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total
