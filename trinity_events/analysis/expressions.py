"""Conditions on the JSON of a state: a small language of paths, comparisons and connectives.

::

    condition   =  condition "or" condition  |  condition "and" condition  |  "not" condition
                |  "(" condition ")"  |  value  |  value comparison value
    comparison  =  "=="  |  "!="  |  "<"  |  "<="  |  ">"  |  ">="  |  "in"
    value       =  path  |  "count(" path ")"  |  number  |  'text'  |  constant
    constant    =  "true"  |  "false"  |  "null"
    path        =  name { "." name }

A name is a field, a key, an index of a list, or ``*`` for each of them. A name with other
characters than letters, digits, ``_`` and ``-`` stands in quotes: ``steps.3.kinds.'a/b'``. A
condition on a path with ``*`` is true if it is true for one of its values. A path that leads
nowhere is ``null``, which is neither less nor greater than anything.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from ..errors import StructuredError

_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?\d+(?:\.\d+)?(?![\w.-]))|(?P<compare>==|!=|<=|>=|<|>)"
    r"|(?P<text>'[^']*'|\"[^\"]*\")|(?P<mark>[().])|(?P<name>\*|[A-Za-z0-9_][\w-]*))"
)
_PLAIN = re.compile(r"[A-Za-z0-9_][\w-]*", re.ASCII)
_LONGEST = 2000
"""Maximum characters of a condition."""
_DEEPEST = 50
"""Maximum parentheses and negations around one another."""
_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None}
_WORDS = {"and", "or", "not", "in", *_CONSTANTS}

Values = Callable[[Any], list[Any]]
"""Function from a document to the values of an operand: several for a path with ``*``."""
Test = Callable[[Any], bool]


class BadExpression(StructuredError, ValueError):
    """The text is no condition.

    Attributes:
        condition: The text.
        fault: What is wrong with it.
        token: Where it is wrong; ``the end`` if it ends too early.
        expected: What is expected there.
        limit: Limit that it exceeds.
    """

    condition: str
    fault: Literal["deep", "long", "token", "unexpected"]
    token: str = ""
    expected: str = ""
    limit: int = 0
    texts: ClassVar = {
        "deep": "the condition is nested more than {limit} deep",
        "long": "the condition has more than {limit} characters",
        "token": "{condition!r}: {token!r} is not understood",
        "unexpected": "{condition!r}: {expected} is expected instead of {token!r}",
    }


class Condition:
    """Condition on a JSON document.

    Args:
        text: The condition, in the language of this module.

    Raises:
        BadExpression: if it is none.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.fields: set[str] = set()
        """First names of its paths: the fields of the document that it depends on."""
        self._tokens = list(_tokens(text))
        self._at = self._depth = 0
        self._test = self._any()
        if self._at < len(self._tokens):
            raise self._unexpected("the end")

    @staticmethod
    def values(document: Any, path: str) -> list[Any]:
        """Return the values at a path of a document."""
        condition = Condition(path)
        condition._at = 0
        return _follow(document, condition._path())

    def __call__(self, document: Any) -> bool:
        """Return True if the condition holds for a document."""
        return self._test(document)

    def _any(self) -> Test:
        tests = [self._all()]
        while self._pop("or"):
            tests.append(self._all())
        return tests[0] if len(tests) == 1 else lambda doc: any(test(doc) for test in tests)

    def _all(self) -> Test:
        tests = [self._one()]
        while self._pop("and"):
            tests.append(self._one())
        return tests[0] if len(tests) == 1 else lambda doc: all(test(doc) for test in tests)

    def _one(self) -> Test:
        self._depth += 1
        # The parser calls itself: Python's own limit would end it with a RecursionError.
        if self._depth > _DEEPEST:
            raise BadExpression(self.text, "deep", limit=_DEEPEST)
        try:
            if self._pop("not"):
                negated = self._one()
                return lambda doc: not negated(doc)
            if self._pop("("):
                inner = self._any()
                self._expect(")")
                return inner
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Test:
        operand = self._value()
        kind, text = self._peek()
        if kind == "compare" or text == "in":
            self._at += 1
            right, compare = self._value(), _COMPARISONS[text]
            # Each value with each: a path with `*` has several, and one that fits is enough.
            return lambda doc: any(compare(a, b) for a in operand(doc) for b in right(doc))
        return lambda doc: any(bool(value) for value in operand(doc))

    def _value(self) -> Values:
        kind, text = self._peek()
        if kind == "number":
            self._at += 1
            number = float(text) if "." in text else int(text)
            return lambda _: [number]
        if kind == "text" and not self._is_path():
            self._at += 1
            return lambda _: [text[1:-1]]
        if kind == "name" and text in _CONSTANTS:
            self._at += 1
            return lambda _: [_CONSTANTS[text]]
        if text == "count" and self._peek(1)[1] == "(":
            self._at += 2
            counted = self._path()
            self._expect(")")
            return lambda doc: [sum(map(_count, _follow(doc, counted)))]
        path = self._path()
        return lambda doc: _follow(doc, path)

    def _is_path(self) -> bool:
        """Return True if the text at hand is the quoted first name of a path."""
        return self._peek(1)[1] == "."

    def _path(self) -> list[str | None]:
        names = [self._name()]
        # For callers that build only these fields of a document.
        self.fields.add(names[0] or "*")
        while self._pop("."):
            names.append(self._name())
        return names

    def _name(self) -> str | None:
        """Take a name; None for each of them."""
        kind, text = self._peek()
        if kind not in ("name", "number", "text") or text in _WORDS:
            raise self._unexpected("a path, a number or a text")
        self._at += 1
        if kind == "text":
            return text[1:-1]
        return None if text == "*" else text

    def _peek(self, ahead: int = 0) -> tuple[str, str]:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ("end", "")

    def _pop(self, text: str) -> bool:
        kind, token = self._peek()
        if token != text or kind not in ("name", "mark"):
            return False
        self._at += 1
        return True

    def _expect(self, text: str) -> None:
        if not self._pop(text):
            raise self._unexpected(repr(text))

    def _unexpected(self, expected: str) -> BadExpression:
        token = self._peek()[1] or "the end"
        return BadExpression(self.text, "unexpected", token, expected)


def format_path(names: Sequence[str]) -> str:
    """Return a path as a condition writes it, with quotes around names that need them."""
    quoted = [name if _is_plain(name) else _quote(name) for name in names]
    if quoted[0].isdecimal():  # it would be a number
        quoted[0] = _quote(quoted[0])
    return ".".join(quoted)


def _is_plain(name: str) -> bool:
    return _PLAIN.fullmatch(name) is not None and name not in _WORDS


def _quote(name: str) -> str:
    return f'"{name}"' if "'" in name else f"'{name}'"


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    if len(text) > _LONGEST:
        raise BadExpression(text, "long", limit=_LONGEST)
    at, end = 0, len(text.rstrip())
    in_path = False
    while at < end:
        match = _TOKEN.match(text, at)
        # The numbers of a path are names: "steps.3.kinds" has no number with a fraction.
        if in_path and match is not None and match["number"]:
            match = re.compile(r"\s*(?P<name>\d+)").match(text, at)
        if match is None or match.lastgroup is None:
            raise BadExpression(text, "token", text[at:].strip()[:20])
        in_path = match[match.lastgroup] == "."
        yield match.lastgroup, match[match.lastgroup]
        at = match.end()


def _follow(document: Any, path: list[str | None]) -> list[Any]:
    """Return the values at a path: one without ``*``, which is None if the path leads nowhere."""
    values = [document]
    for name in path:
        # Breadth first: each name of the path is taken for all values at once.
        values = [inner for value in values for inner in _children(value, name)]
    return values


def _children(value: Any, name: str | None) -> list[Any]:
    if name is None:
        if isinstance(value, dict):
            return list(value.values())
        return list(value) if isinstance(value, list | tuple) else []
    if isinstance(value, dict):
        return [value.get(name)]
    if isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
        return [value[int(name)]]
    return [None]


def _count(value: Any) -> int:
    # A path that leads nowhere: nothing is there to be counted.
    if value is None:
        return 0
    return len(value) if isinstance(value, dict | list | tuple) else 1


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Return an order that is false between values of different kinds."""

    def compared(a: Any, b: Any) -> bool:
        numbers = isinstance(a, int | float) and isinstance(b, int | float)
        # Python would raise for other pairs: a condition must have an answer for every state.
        return (numbers or (isinstance(a, str) and isinstance(b, str))) and compare(a, b)

    return compared


def _is_in(a: Any, b: Any) -> bool:
    if isinstance(b, str):
        return isinstance(a, str) and a in b
    return isinstance(b, dict | list | tuple) and a in b


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": _ordered(operator.lt),
    "<=": _ordered(operator.le),
    ">": _ordered(operator.gt),
    ">=": _ordered(operator.ge),
    "in": _is_in,
}
