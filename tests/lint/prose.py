"""Check the prose of the code and the pages against the rules of CONTRIBUTING.md.

Usage: python -m tests.lint.prose [FILE ...]
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CODE = ("schemas", "trinity_events", "workers", "benchmarks", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")
OPENERS = (
    *("What", "Whether", "Which", "Who", "Whom", "Whose", "Where"),
    *("How", "Of", "So", "That", "As"),
)
_OPENER = re.compile(rf"\s*(?:{'|'.join(OPENERS)})\b")
_SUBJECT = re.compile(
    r"\b(?:whoever|whomever|nobody|somebody|anybody|everybody|those who|he who)\b"
    r"|(?:^|[.:;]\s+)Who\b",
    re.IGNORECASE,
)


class Finding(NamedTuple):
    """One place that breaks a rule."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.text}"


def in_code(path: Path, source: str) -> Iterator[Finding]:
    """Yield the findings in the docstrings, strings and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        for text, line in _docstrings(node):
            if match := _OPENER.match(text):
                yield Finding(path, line, f"a docstring opens with {match[0].strip()!r}")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _subjects(path, node.value, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _subjects(path, token.string.lstrip("# "), token.start[0])


def _docstrings(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the strings that stand alone in a body: the node's docstring, and its constants'."""
    body = getattr(node, "body", ())
    for statement in body if isinstance(body, list) else ():
        if (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        ):
            yield statement.value.value, statement.lineno


def in_page(path: Path, source: str) -> Iterator[Finding]:
    """Yield the findings in a page, without its code."""
    code = False
    for number, line in enumerate(source.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if not code:
            yield from _subjects(path, re.sub(r"`[^`]*`", "", line), number)


def in_script(path: Path, source: str) -> Iterator[Finding]:
    """Yield the findings in the comments of a Lua script."""
    for number, line in enumerate(source.splitlines(), 1):
        _, dashes, comment = line.partition("--")
        if dashes:
            yield from _subjects(path, comment.strip(), number)


def _subjects(path: Path, text: str, line: int) -> Iterator[Finding]:
    for match in _SUBJECT.finditer(text):
        at = line + text.count("\n", 0, match.start())
        word = match[0].lstrip(".:; \n")
        yield Finding(path, at, f"{word!r} is no role: name the publisher, reader, rank or user")


def check(path: Path) -> Iterator[Finding]:
    """Yield the findings in a file."""
    yield from _CHECKS[path.suffix](path, path.read_text())


_CHECKS = {".py": in_code, ".md": in_page, ".lua": in_script}


def files() -> Iterator[Path]:
    """Yield the files that are checked."""
    for name in (*CODE, *PAGES):
        place = ROOT / name
        paths = [place] if place.is_file() else place.rglob("*")
        yield from sorted(path for path in paths if path.suffix in _CHECKS)


def main() -> None:
    """Print every finding, and exit with 1 if there is one."""
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or list(files())
    findings = [finding for path in chosen for finding in check(path)]
    for finding in findings:
        print(finding)
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
