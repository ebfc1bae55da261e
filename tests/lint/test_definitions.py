"""Claims about names of classes and functions in the product."""

from __future__ import annotations

import ast
from collections import defaultdict

from .prose import ROOT

PACKAGES = ("schemas/trinity_schemas", "trinity_events", "workers/trinity_workers")


def test_no_class_name_is_in_two_modules_of_the_product() -> None:
    homes = defaultdict(list)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 500
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_no_function_is_named_by_a_phrase_that_begins_with_of() -> None:
    phrases = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.lstrip("_").startswith("of_")
    ]
    assert phrases == []
