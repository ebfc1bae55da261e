"""Grades in a judge's reply.

1. A reply has one grade, with its scale, or it is refused: no other number is taken for a grade.
2. The last line decides if it is a grade alone ("8/10"), or begins with the word ("Grade: 8").
3. Otherwise all grades that the reply states are the same grade.
4. A grade has the scale that is written with it ("3/5", "80%"). Without one it has that of the
   settings, and a reply that names another scale is refused.

`tests/workers/rewards/test_grades.py` holds them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import ClassVar, Literal, NamedTuple

from trinity_events.errors import StructuredError
from trinity_events.system.error_text import shorten

_LONGEST = 1 << 15
"""Characters of a reply after its reasoning: a bound on the time of the expressions."""
_SHOWN = 80
"""Characters of a line that an error shows: the reply may be an essay."""
_NEAR = 1e-9
"""Largest difference of two shares that are one grade: 8/10 and 80% differ by rounding."""

_SAME = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\uff0d", "-"),
        **dict.fromkeys("\u2044\u2215\uff0f", "/"),
        **dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " "),
        **dict.fromkeys("*`$", None),
        "\u2014": " - ",
        "\uff05": "%",
        "\uff1a": ":",
    }
)
"""Spellings of one character, and the marks of emphasis and of formulas, which carry no meaning."""
_PRODUCT = re.compile(r"(?<=\d)\*+(?=\d)")
"""Asterisks that are no emphasis: without them, two numbers would become one."""
_EMPHASIS = re.compile(r"(?<![A-Za-z])_+|_+(?![A-Za-z])")
_REASONING = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_REASONED = re.compile(r"</think(?:ing)?>", re.IGNORECASE)

_DIGITS = r"(?:\.\d+|\d(?:[\d.,]*\d)?)"
_OF = r"(?:/|(?:out[ ])?of(?:[ ]a[ ](?:possible|maximum|total)(?:[ ]of)?)?)"
_AMOUNT = re.compile(
    rf"""
    (?<![\w.,/])
    (?P<number>[-+]?{_DIGITS}(?:[eE][-+]?\d{{1,3}})?)
    (?:
        [ ]?(?P<percent>%|per[ ]?cent\b)
      | (?:[ ](?:points?|stars?|marks?))?
        (?:[ ]*[(]?{_OF}[ ]*(?P<scale>{_DIGITS})[)]?)?
        (?:[ ](?:points?|stars?|marks?)\b)?
    )
    (?![\w%/]|[.,:]\d)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_BEGINS = re.compile(r"[-+]?[.,]?\d")
_AGAIN = re.compile(r"[ ]*[=(][ ]*")
"""Begin of the same grade on another scale: "8/10 (80%)"."""
_ENDS = re.compile(
    r"""
    [ ]*
    (?:
        $
      | [.!;]+(?=[ ]|$)
      | [,:](?=[ ]+["']?[^\W\d])
      | [ ]-+[ ]+(?=[^\W\d])
      | [(](?=[^\W\d])
      | [])}>"'|]+(?![ ]*[-+.]?\d)
      | <(?=[/a-z])
      | (?:because|since|as|due|given|but|overall|on[ ]a)\b
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Text after a grade. Before a noun ("3 steps"), or another number ("7-8"), there is none."""
_FULL = r"(?:(?:final|overall|total|my|the|numeric(?:al)?)[ _]+)*"
_NOUN = r"(?:grade|score|rating|mark|evaluation|assessment|verdict|points)"
_RANGE = (
    r"(?:[(\[][ ]*\d+[ ]*(?:-|to)[ ]*(?P<top>\d+)[ ]*[)\]]|[(]?(?:out[ ]of|/)[ ]*(?P<of>\d+)[)]?)"
)
_BETWEEN = (
    r"(?:[ :=>|\"'\[({\\]|->|→|-(?=[ ])|boxed(?=[{])"
    r"|\b(?:is|was|of|would|will|be|an?|the|this|that|for|to|response|answer|solution|submission"
    r"|it|i|give|assign|award|about|around|only|just|solid|strong|perfect|therefore|thus|hence)\b)*"
)
_LABEL = re.compile(
    rf"(?<![\w-]){_FULL}{_NOUN}[\"']?(?![\w-])[ ]*{_RANGE}?{_BETWEEN}", re.IGNORECASE
)
_VERB = re.compile(
    r"""
    (?:
        \b(?:I|we)(?:'d|'ll|[ ](?:would|will|must|can|have[ ]to))?[ ]
        (?:give|rate|grade|score|award|assign|mark)[ ]
        (?:(?:it|this|that|the|response|answer|solution|submission)[ ])*
      | \b(?:deserves|earns|merits|warrants|receives)[ ](?:only[ ]|just[ ])?(?=an?[ ]|the[ ])
    )
    (?:(?:an?|the|only|just|solid|strong|perfect|full|score|grade|rating|mark|of|as|at|with)[ ])*
    """,
    re.VERBOSE | re.IGNORECASE,
)
_ALONE = re.compile(r"[ \"'(\[{|\\]*(?:boxed[{][ ]*)?")
_REMARK = re.compile(
    r"[ ]*(?:[(](?![ ]*[-+.]?\d)[^()]*[)]|on[ ]a[ ](?:\d+-point[ ])?scale\b[^.]*)?[ .!\"')\]}|]*$"
)
_LINE_BEGINS = re.compile(r"[ \"'(\[{|<#>-]*")
_CLAUSE = re.compile(r"(?:^|[.!?][ ]|:|[ ]-[ ])[ ]*")
_SCALES = re.compile(
    rf"""
    (?<!\d)(?<!\d[ ])\bout[ ]of[ ](?P<of>{_DIGITS})(?=[ ]*(?:[,.:;)]|$))
  | \bscale[ ](?:of|from|between)?[ ]*(?:\d+[ ]?(?:-|to|and)[ ]?)?(?P<top>{_DIGITS})
  | \b(?P<points>\d+)-point[ ]scale
  | \bmax(?:imum)?[ _](?:score|grade|points|rating)["']?[ ]*[:=][ ]*(?P<max>{_DIGITS})
    """,
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)


class UnclearGrade(StructuredError):
    """A reply has no clear grade; its text is the end of a sentence.

    Attributes:
        fault: ``cut off`` or ``long`` for a reply that is not whole. ``none`` and ``no grade``
            without one, ``several`` for grades that differ. ``range``, ``infinite``, ``scale`` and
            ``no best`` for a grade that is none of its scale. ``no number``, ``text``, ``two ways``
            and ``unclear`` for one that cannot be read.
        line: Line, number or grades of the reply.
        grade: The grade, or the best one of its scale.
        best: Best grade of the settings.
        length: Characters of the reply.
        limit: Characters of a reply that are read.
    """

    fault: Literal[
        "cut off",
        "long",
        "none",
        "no grade",
        "range",
        "several",
        "scale",
        "no number",
        "unclear",
        "no best",
        "two ways",
        "text",
        "infinite",
    ]
    line: str = ""
    grade: float = 0.0
    best: float = 0.0
    length: int = 0
    limit: int = 0
    texts: ClassVar = {
        "cut off": "was cut off before its grade: raise its limit of tokens",
        "long": "gave {length} characters, of which at most {limit} are read",
        "none": "gave no grade",
        "no grade": "gave no grade: its last line is {line}",
        "range": "gave the grade {grade:g}, which is not from 0 to {best:g}",
        "several": "gave several grades: {line}",
        "scale": "named a scale up to {grade:g}, and the best grade is {best:g}",
        "no number": "gave a grade that is no number: {line}",
        "unclear": "gave no clear grade: {line}",
        "no best": "gave a grade of a scale without a best grade: {line}",
        "two ways": "gave {line}, which may be a thousand or a decimal number",
        "text": "gave {line}, which is no number",
        "infinite": "gave the grade {grade}",
    }


class _Grade(NamedTuple):
    """Grade of a reply."""

    share: float
    """Grade from 0 to 1."""
    has_scale: bool
    """True if the reply writes its scale."""


def parse_grade(reply: str, best: float) -> float:
    """Return the grade of a judge's reply, from 0 to 1.

    Args:
        reply: Text of the reply.
        best: Best grade, for a reply that names no scale.

    Raises:
        UnclearGrade: The reply has no grade, several, or one that can be read in two ways.
    """
    # After the last closing mark: reasoning states grades that it then rejects.
    text = _REASONED.split(reply)[-1]
    if _REASONING.search(text):
        raise UnclearGrade("cut off")
    # After the reasoning is gone, which may be long.
    if len(text) > _LONGEST:
        raise UnclearGrade("long", length=len(text), limit=_LONGEST)
    # Products first: the table removes asterisks, and would make "2*3" the number 23.
    text = _PRODUCT.sub(" x ", text).translate(_SAME)
    lines = [_EMPHASIS.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if any(map(str.isalnum, line))]
    if not lines:
        raise UnclearGrade("none")
    # First: what a reply ends with is its result (rule 2).
    grade = _read_last_line(lines, best)
    if grade is None:
        grade = _agreed([*_read_labels(lines, best), *_read_fractions(lines, best)], best)
    if grade is None:
        raise UnclearGrade("no grade", _format_line(lines[-1]))
    # A grade with its own scale needs no other (rule 4).
    if not grade.has_scale:
        _check_scale("\n".join(lines), best)
    if not 0 <= grade.share <= 1:
        raise UnclearGrade("range", grade=grade.share * best, best=best)
    return grade.share


def _agreed(grades: list[_Grade], best: float) -> _Grade | None:
    """Return the only grade of a list, None if it is empty. Raises UnclearGrade if they differ."""
    # Compared as shares, since each may have a scale of its own.
    if any(abs(grade.share - grades[0].share) > _NEAR for grade in grades):
        values = ", ".join(f"{grade.share * best:g}" for grade in grades)
        raise UnclearGrade("several", values)
    return grades[0] if grades else None


def _read_last_line(lines: list[str], best: float) -> _Grade | None:
    """Return the grade of a last line that is one alone, or begins with the word; else None."""
    line = lines[-1]
    alone = _read_alone(line, best)
    if alone is not None:
        # A number alone after "Grade: 3" may be another number, such as the reference.
        return _agreed([alone, *_read_begun_lines(lines[:-1], best)], best)
    label = _LABEL.match(line, _begin_of(line))
    return None if label is None else _read_labelled(line, label, best)


def _read_alone(line: str, best: float) -> _Grade | None:
    begin = _ALONE.match(line)
    amount = _AMOUNT.match(line, begin.end() if begin else 0)
    if amount is None or not _REMARK.match(line, _end_of(line, amount, best)):
        return None
    return _read_amount(line, amount, best)


def _read_begun_lines(lines: list[str], best: float) -> Iterator[_Grade]:
    """Yield the grades of lines that begin with the word, as far as they are clear."""
    for line in lines:
        label = _LABEL.match(line, _begin_of(line))
        with suppress(UnclearGrade):
            grade = None if label is None else _read_labelled(line, label, best)
            if grade is not None:
                yield grade


def _read_labels(lines: list[str], best: float) -> Iterator[_Grade]:
    """Yield the grades after their names; those in prose only from the first and the last line.

    A first line that is a grade alone is one too.
    """
    for number, line in enumerate(lines):
        if number == 0 and (alone := _read_alone(line, best)) is not None:
            yield alone
            continue
        begin = _begin_of(line)
        for label in [*_LABEL.finditer(line), *_VERB.finditer(line)]:
            grade = None
            if label.start() == begin:
                grade = _read_labelled(line, label, best)
            elif number in (0, len(lines) - 1):
                with suppress(UnclearGrade):  # "the score of 3 steps" is no grade
                    grade = _read_labelled(line, label, best)
            if grade is not None:
                yield grade


def _read_fractions(lines: list[str], best: float) -> Iterator[_Grade]:
    """Yield the grades at the begin of a clause whose scale is that of the settings."""
    for line in lines:
        for clause in _CLAUSE.finditer(line):
            amount = _AMOUNT.match(line, clause.end())
            if amount is None or amount["scale"] is None or not _ENDS.match(line, amount.end()):
                continue
            if _number(amount["scale"], best) == best:
                yield _read_amount(line, amount, best)


def _begin_of(line: str) -> int:
    """Return the place after the marks that a line may begin with, such as those of a list."""
    marks = _LINE_BEGINS.match(line)
    return marks.end() if marks else 0


def _read_labelled(line: str, label: re.Match[str], best: float) -> _Grade | None:
    """Return the grade after a label; None if there is no number after it.

    Raises UnclearGrade for a number that is no grade, such as that of "Grade: 7-8".
    """
    # "Score (0-5): 4" names its scale in the label.
    for top in filter(None, label.groupdict().values()):
        if float(top) != best:
            raise UnclearGrade("scale", grade=float(top), best=best)
    amount = _AMOUNT.match(line, label.end())
    if amount is None:
        if _BEGINS.match(line, label.end()):
            raise UnclearGrade("no number", _format_line(line))
        return None
    if not _ENDS.match(line, _end_of(line, amount, best)):
        raise UnclearGrade("unclear", _format_line(line))
    return _read_amount(line, amount, best)


def _end_of(line: str, amount: re.Match[str], best: float) -> int:
    """Return the end of an amount, and of the same one on another scale after it."""
    again = _AGAIN.match(line, amount.end())
    second = None if again is None else _AMOUNT.match(line, again.end())
    if again is None or second is None:
        return amount.end()
    if abs(_read_amount(line, second, best).share - _read_amount(line, amount, best).share) > _NEAR:
        raise UnclearGrade("several", _format_line(line))
    end = second.end()
    return end + line.startswith(")", end)


def _read_amount(line: str, amount: re.Match[str], best: float) -> _Grade:
    number = _number(amount["number"], best)
    if amount["percent"] is not None:
        return _Grade(number / 100, has_scale=True)
    if amount["scale"] is None:
        return _Grade(number / best, has_scale=False)
    scale = _number(amount["scale"], best)
    if not scale > 0:
        raise UnclearGrade("no best", _format_line(line))
    return _Grade(number / scale, has_scale=True)


def _number(text: str, best: float) -> float:
    """Return a number whose point or comma may stand for decimals or for thousands.

    Raises UnclearGrade if both are possible.
    """
    sign = -1.0 if text.startswith("-") else 1.0
    digits, _, exponent = text.lstrip("+-").lower().partition("e")
    marks = re.sub(r"\d", "", digits)
    if len(marks) == 1 and re.fullmatch(r"[1-9]\d{0,2}[.,]\d{3}", digits):
        # "1,000" is a thousand where grades are that large, "7.500" a decimal where they are not.
        decimal = marks == "." and best < 1000
        if not decimal and not (marks == "," and best >= 1000):
            raise UnclearGrade("two ways", text)
        digits = digits if decimal else digits.replace(",", "")
    elif re.fullmatch(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", digits):
        digits = digits.replace(",", "")
    elif re.fullmatch(r"[1-9]\d{0,2}(?:\.\d{3})+(?:,\d+)?", digits) and len(marks) > 1:
        digits = digits.replace(".", "").replace(",", ".")
    elif len(marks) == 1:
        digits = digits.replace(",", ".")
    elif marks:
        raise UnclearGrade("text", text)
    number = sign * float(f"{digits}e{exponent}" if exponent else digits)
    if not math.isfinite(number):
        raise UnclearGrade("infinite", grade=number)
    return number


def _check_scale(text: str, best: float) -> None:
    """Raise UnclearGrade if a reply names another scale than that of the settings."""
    for scale in _SCALES.finditer(text):
        top = _number(next(filter(None, scale.groups())), best)
        if top != best:
            raise UnclearGrade("scale", grade=top, best=best)


def _format_line(line: str) -> str:
    return repr(shorten(line, _SHOWN))
