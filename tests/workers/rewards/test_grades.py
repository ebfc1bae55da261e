"""Claims about the grade in a judge's reply: right with its scale, or refused."""

from __future__ import annotations

import time

import pytest

from trinity_workers.rewards.grades import UnclearGrade, parse_grade

CLEAR = {
    # alone, as the built-in prompt asks for it
    "8": 0.8,
    "The answer is fine.\n8": 0.8,
    "8.": 0.8,
    "7.5": 0.75,
    ".5": 0.05,
    "0": 0.0,
    "10.0": 1.0,
    "+8": 0.8,
    "9e-1": 0.09,
    "8 points": 0.8,
    '"8"': 0.8,
    "6 (confidence 90%)": 0.6,
    # with its scale
    "0/10": 0.0,
    "8/10": 0.8,
    "4/5": 0.8,
    "8 / 10": 0.8,
    "8\u204410": 0.8,
    "8 out of 10": 0.8,
    "8 (out of 10)": 0.8,
    "80%": 0.8,
    "80 percent": 0.8,
    "8/10 (80%)": 0.8,
    "8/10 = 80%": 0.8,
    "8 on a scale of 1 to 10": 0.8,
    "Correct! 10/10": 1.0,
    "8/10 \u2013 the response is right": 0.8,
    "I'd give it a solid 8 out of a possible 10.": 0.8,
    "\u8bc4\u5206\uff1a8/10": 0.8,
    # with its name
    "Grade: 8/10": 0.8,
    "Grade: 8 out of 10 points": 0.8,
    "Score: 4 / 10": 0.4,
    "Score (out of 10): 8": 0.8,
    "Grade (1-10): 8.5": 0.85,
    "Rating: [[5]]": 0.5,
    "Grade - 8": 0.8,
    "grade 8": 0.8,
    "Grade:\n8": 0.8,
    "My rating: 4 stars out of 5": 0.8,
    "The final grade is 8.": 0.8,
    "I would give this response an 8.": 0.8,
    "This deserves a 7 because it has 2 errors.": 0.7,
    "Grade: 8. 2 errors were found": 0.8,
    "Grade: 8, since step 2 is wrong": 0.8,
    "Grade: 8\nConfidence: 90%": 0.8,
    "Grade: 8\nReasoning: the score of 8 reflects it": 0.8,
    "8\n\nThe response is right since 2 + 3 = 5.": 0.8,
    "Score: 8/10\n\nThe response has 3 errors of 4.": 0.8,
    "Out of 10, I would give it a 7.": 0.7,
    # in Markdown, LaTeX, JSON and XML
    "**8**/10": 0.8,
    "**Grade:** 3/10": 0.3,
    "***Final Grade: 8.5/10***": 0.85,
    "Grade: _8_": 0.8,
    "> **Grade:** 8": 0.8,
    "## Grade\n\n8": 0.8,
    "| Grade | 8 |": 0.8,
    "$\\boxed{8}$": 0.8,
    "The grade is \\boxed{8}.": 0.8,
    '{"score": 8, "reason": "2 errors"}': 0.8,
    '```json\n{\n  "reason": "2 errors",\n  "score": 7.5\n}\n```': 0.75,
    "{'grade': '8/10'}": 0.8,
    "<score>8</score>": 0.8,
    # with other numbers before it
    "3 out of 5 steps are right.\n\nGrade: 6": 0.6,
    "Correctness score: 8\nStyle score: 5\n\n7": 0.7,
    "Correctness: 8/10\nClarity: 6/10\nOverall grade: 7/10": 0.7,
    "Grade: 7-8 seems fair.\n\n8": 0.8,
    "<think>It has 3 errors.</think>\n8": 0.8,
    "It has 3 errors.</think>8": 0.8,
    # in other alphabets and conventions
    "7,5": 0.75,
    "Grade: 7,5/10": 0.75,
    "0,750": 0.075,
    "\uff11\uff10\uff0f\uff11\uff10": 1.0,
}

UNCLEAR = [
    # no grade
    "",
    "no number",
    "Grade: A",
    "Grade: A\nErrors: 2",
    "Grade: eight, for 3 of 4 steps",
    "nan",
    "The response is right: 2 + 3 = 5.",
    "The response has 2 errors",
    "Number of errors: 3",
    "1. The response is right\n2. It is clear",
    "I give credit for 2 of the 5 steps",
    "The response gives the answer 5.",
    "The answer is 7/10, as the reference says it.",
    "<think>It has 3 errors",
    # out of range
    "-3",
    "Grade: \u22123",
    "11",
    "12/10",
    "150%",
    "Grade: 3/0",
    "1e400",
    # several
    "7-8",
    "7\u20138/10",
    "Grade: 7 to 8",
    "between 7 and 8",
    "7 or 8",
    "8 9",
    "Grade: 8, 9",
    "6 (90%)",
    "Correctness: 8/10\nClarity: 6/10",
    "Grade: 7/10 for correctness, 9/10 for style",
    "Grade: 8\nGrade: 6\nThe end",
    "Grade: 3\nThe reference is:\n8",
    # another scale
    "Score (out of 5): 4",
    "Rating (1-5): 4",
    "On a scale of 1 to 5, I would give it a 4.",
    "Out of 5, I'd give it 4.",
    '{"score": 4, "max_score": 5}',
    # readable in two ways
    "1,000",
    "7.5.2",
    "Grade: 7 1/2",
    "Grade: 7\u00bd",
    "\u00bd",
    "8th",
    "8+",
    "8?",
    "<8",
    ">= 8",
    "2*3",
    "Grade: 8:30",
    "Grade: 8/10/2024",
]


@pytest.mark.parametrize("reply", CLEAR)
def test_a_grade_is_read_with_its_scale_however_it_is_written(reply):
    assert parse_grade(reply, 10.0) == pytest.approx(CLEAR[reply], abs=1e-12)


@pytest.mark.parametrize("reply", UNCLEAR)
def test_a_reply_without_one_clear_grade_is_refused(reply):
    with pytest.raises(UnclearGrade) as caught:
        parse_grade(reply, 10.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reply", "best", "share"),
    [
        ("85", 100.0, 0.85),
        ("85/100", 100.0, 0.85),
        ("80%", 100.0, 0.8),
        ("0.8", 1.0, 0.8),
        ("Grade (0-1): 0.8", 1.0, 0.8),
        ("8/10", 1.0, 0.8),
        ("1,000", 1000.0, 1.0),
        ("2,500", 5000.0, 0.5),
        ("2,000.0", 4000.0, 0.5),
        ("2.000,0", 4000.0, 0.5),
    ],
)
def test_a_grade_without_a_scale_has_that_of_the_settings(reply, best, share):
    assert parse_grade(reply, best) == pytest.approx(share)


def test_a_point_that_may_stand_for_thousands_is_refused_where_grades_are_that_large():
    assert parse_grade("7.500", 10.0) == 0.75
    with pytest.raises(UnclearGrade):
        parse_grade("1.000", 1000.0)


@pytest.mark.parametrize("piece", ["grade ", "8 ", "(", "grade: no\n", "scale ", "<think>", "my "])
def test_a_hostile_reply_holds_the_explorer_up_for_no_longer_than_a_moment(piece):
    began = time.monotonic()
    for size in (1 << 15, 1 << 20):
        with pytest.raises(UnclearGrade):
            parse_grade(piece * (size // len(piece)) + "x\nend", 10.0)
    assert time.monotonic() - began < 5
