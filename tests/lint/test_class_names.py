"""Claim: a class name of the product means one thing, wherever a reader meets it."""

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
