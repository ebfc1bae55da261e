"""What only ``make nightly`` runs is a longer form of what ``make test`` runs too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
MARKED = [
    path.relative_to(TESTS)
    for path in sorted(TESTS.rglob("test_*.py"))
    if "mark.nightly" in path.read_text() and path != Path(__file__)
]


def load(path: Path) -> ModuleType:
    return importlib.import_module(".".join(["tests", *path.with_suffix("").parts]))


def is_nightly(marks: Any) -> bool:
    return any(mark.name == "nightly" for mark in marks)


def unrepresented(module: Any) -> Iterator[str]:
    """Yield the nightly tests of a module of which no shorter form is in ``make test``."""
    for name, function in vars(module).items():
        marks = getattr(function, "pytestmark", [])
        for mark in marks:
            if mark.name == "nightly" and not is_representative(*mark.args):
                yield f"{name}: {mark.args} is no test of make test"
            if mark.name == "parametrize":
                cases = list(mark.args[1])
                if cases and all(is_nightly(getattr(case, "marks", ())) for case in cases):
                    yield f"{name}: all cases are nightly"


def is_representative(node: str = "") -> bool:
    path, _, name = node.partition("::")
    if not (TESTS / path).is_file():
        return False
    function = getattr(load(Path(path)), name, None)
    return function is not None and not is_nightly(getattr(function, "pytestmark", []))


@pytest.mark.processes  # modules that ask what this machine can do, when they are imported
@pytest.mark.parametrize("path", MARKED, ids=str)
def test_every_nightly_test_has_a_representative_in_make_test(path: Path) -> None:
    assert list(unrepresented(load(path))) == []


def module_of(*marks: pytest.MarkDecorator) -> SimpleNamespace:
    def test_it() -> None: ...

    for mark in marks:
        mark(test_it)
    return SimpleNamespace(test_it=test_it)


def test_a_test_that_names_nothing_or_another_nightly_one_is_found() -> None:
    this = Path(__file__).relative_to(TESTS)
    represented = f"{this}::test_a_test_that_names_nothing_or_another_nightly_one_is_found"
    assert list(unrepresented(module_of(pytest.mark.nightly(represented)))) == []
    for args in ((), (f"{this}::test_of_no_file",), ("nowhere.py::test_it",)):
        assert list(unrepresented(module_of(pytest.mark.nightly(*args))))


def test_a_test_without_a_case_in_make_test_is_found() -> None:
    cases = [pytest.param(number, marks=pytest.mark.nightly) for number in range(2)]
    assert list(unrepresented(module_of(pytest.mark.parametrize("number", cases))))
    assert not list(unrepresented(module_of(pytest.mark.parametrize("number", [*cases, 2]))))
