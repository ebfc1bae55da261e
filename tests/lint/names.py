"""Check the names of variables, parameters and attributes against the rules of CONTRIBUTING.md.

Scripts of the dashboard are checked by a pattern, for each place where a name stands alone.

A name holds a thing, so it is a noun for it: a numeral (``one``) or a participle (``found``) leaves
the reader to find out what was counted or found.

Usage: python -m tests.lint.names [FILE ...]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from .prose import ROOT, Finding

PLACES = ("schemas", "trinity_events", "workers", "tests", "benchmarks", "examples", "docs")
REFUSED = frozenset(
    {"one", "two", "some"}
    | {"found", "told", "said", "asked", "held", "known", "left", "kept", "wanted", "taken"}
)
SCRIPTS = ROOT / "trinity_events" / "dashboard" / "static"
# `left` is a word of the browser's own for a place.
_SCRIPT_NAMES = "|".join(sorted(REFUSED - {"left"}))
_IN_SCRIPT = re.compile(
    rf"\b(?:const|let|function)\s+({_SCRIPT_NAMES})\b|[(\[{{,]\s*({_SCRIPT_NAMES})\s*(?=[,)\]}}=])"
)


def in_script(path: Path, source: str) -> Iterator[Finding]:
    """Yield a finding for each line of a script that binds a refused name."""
    for number, line in enumerate(source.splitlines(), start=1):
        for match in _IN_SCRIPT.finditer(line.partition("// ")[0]):
            text = f"{match[1] or match[2]!r} names no thing: name it for what it holds"
            yield Finding(path, number, text)


def in_code(path: Path, source: str) -> Iterator[Finding]:
    """Yield a finding for each place of a module that binds a refused name."""
    for node in ast.walk(ast.parse(source)):
        for name in _bound_by(node):
            if name.strip("_") in REFUSED:
                text = f"{name!r} names no thing: name it for what it holds"
                yield Finding(path, getattr(node, "lineno", 0), text)


def _bound_by(node: ast.AST) -> tuple[str, ...]:
    """Return the names that a node binds; those of its children are theirs."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return (name,)
        case ast.Attribute(attr=name, ctx=ast.Store()):
            return (name,)
        case ast.ExceptHandler(name=str(name)) | ast.MatchStar(name=str(name)):
            return (name,)
        case ast.MatchAs(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return (name,)
        case ast.alias(name=name, asname=str(alias)) if alias != name:
            return (alias,)
    return ()


def files() -> Iterator[Path]:
    """Yield the files that are checked."""
    for place in PLACES:
        yield from sorted((ROOT / place).rglob("*.py"))
    yield from sorted(SCRIPTS.glob("*.js"))


def main() -> None:
    """Print every finding, and exit with 1 if there is one."""
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or list(files())
    findings = [
        finding
        for path in chosen
        for finding in (in_script if path.suffix == ".js" else in_code)(path, path.read_text())
    ]
    for finding in findings:
        print(finding)
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
