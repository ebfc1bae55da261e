"""The lint of names: each way to bind a refused name is refused, and its uses are not counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import names

PATH = Path("module.py")


def in_code(source: str) -> list[int]:
    return [finding.line for finding in names.in_code(PATH, source)]


@pytest.mark.parametrize(
    "source",
    [
        "one = 1",
        "one: int = 1",
        "_found = []",
        "for one in range(3): pass",
        "with open('x') as held: pass",
        "[one for one in range(3)]",
        "{one: two for one, two in ()}",
        "def f(wanted): pass",
        "def f(*, kept=1): pass",
        "def f(*asked, **told): pass",
        "lambda taken: 1",
        "if (said := f()): pass",
        "class A:\n    left: int",
        "self.known = 1",
        "self._left = 1",
        "try: pass\nexcept OSError as one: pass",
        "match x:\n    case [*some]: pass",
        "match x:\n    case {**found}: pass",
        "match x:\n    case int() as found: pass",
        "import a as one",
        "from a import b as one",
    ],
)
def test_a_numeral_or_a_participle_names_nothing(source: str) -> None:
    assert in_code(source)


@pytest.mark.parametrize(
    "source",
    ["answer = found.left", "from a import taken", "f(one=1)", "left_over = 1", "x.found()"],
)
def test_a_noun_passes_and_a_use_is_the_fault_of_its_binding(source: str) -> None:
    assert in_code(source) == []


@pytest.mark.parametrize(
    "source",
    ["const one = 1;", "all.map((one) => one.x)", "(a, other, found) => 1", "const [one, b] = c;"],
)
def test_a_script_is_checked_for_the_same_names(source: str) -> None:
    assert list(names.in_script(Path("a.js"), source))
    assert not list(names.in_script(Path("a.js"), 'h("p", { left: 1 }, answer.found); // (one)'))


@pytest.mark.processes
def test_no_name_of_the_project_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.lint.names"],
        cwd=names.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
