"""Tests pass timeouts and limits as arguments, and replace no constant of our modules.

A replaced constant holds for one process, and for all that runs in it. It is a parameter that the
signature does not show, and a test of it is a test of the module's private names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from .prose import ROOT

PACKAGES = ("trinity_schemas", "trinity_events", "trinity_workers")


def replaced_constants(source: str) -> Iterator[str]:
    """Yield the constants of our modules that a test replaces through pytest or mock.

    A target counts as ours unless its name is imported from another package.
    """
    if re.search(r"\.(setattr|setitem|object)\(", source) is None:
        return  # most files: to parse them all takes seconds
    tree = ast.parse(source)
    foreign = set(_foreign_names(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr" | "object"), args=[target, *names]):
                if len(names) > 1 and isinstance(names[0], ast.Constant):  # the last is the value
                    target = ast.Attribute(target, str(names[0].value))
            case ast.Call(func=ast.Attribute(attr="setitem"), args=[target, *_]):
                pass
            case _:
                continue
        name = re.sub(r"^f?['\"]|['\"]$", "", ast.unparse(target))
        constant = name.rpartition(".")[2]
        if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", constant) and name.partition(".")[0] not in foreign:
            yield name


def _foreign_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a source imports from packages that are not ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith(PACKAGES):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            yield from (name for name in names if name not in ("sys", *PACKAGES))


@pytest.mark.parametrize(
    "call",
    [
        "monkeypatch.setattr(reducer, 'BATCH', 10)",
        "monkeypatch.setattr(reducer, '_MOST', 10)",
        "patch.setattr('trinity_events.reducer.reducer.BATCH', 10)",
        "patch.setattr(f'trinity_events.log.{where}.BATCH', 10)",
        "monkeypatch.setattr(sys.modules['trinity_events.server'], '_PATIENCE', 10)",
        "monkeypatch.setitem(reducer.SEGMENTS, 'events', 5)",
        "mock.patch.object(reducer, 'BATCH', 10)",
    ],
)
def test_a_replaced_constant_of_ours_is_refused(call: str) -> None:
    source = f"import sys\nfrom trinity_events.reducer import reducer\n{call}"
    assert len(list(replaced_constants(source))) == 1


@pytest.mark.parametrize(
    "call",
    [
        "monkeypatch.setattr(reducer, 'Reducer', None)",
        "monkeypatch.setattr(reducer, 'backoff_delays', None)",
        "monkeypatch.setattr('trinity_events.reducer.reducer.logger', None)",
        "monkeypatch.setattr(tempfile, 'TMP_MAX', 3)",
        "monkeypatch.setitem(os.environ, 'HOME', 'x')",
    ],
)
def test_a_replaced_function_and_another_package_are_not(call: str) -> None:
    source = f"import os, tempfile\nfrom trinity_events.reducer import reducer\n{call}"
    assert list(replaced_constants(source)) == []


def test_no_constant_is_replaced() -> None:
    replaced = {
        str(path.relative_to(ROOT / "tests")): names
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (names := list(replaced_constants(path.read_text())))
    }
    assert replaced == {}, "pass the value as an argument: see the house rules of CONTRIBUTING.md"
