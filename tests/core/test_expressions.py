"""The language of conditions on a state."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.errors import raises
from trinity_events.analysis.expressions import BadExpression, Condition, format_path

STATE = {
    "closed": None,
    "epoch": 2,
    "trainer": "running",
    "explorers": {
        "explorer-0": {"version": {"step": 4}},
        "explorer-1": {"version": {"step": 5}, "status": "stopped"},
    },
    "steps": {"3": {"kinds": {"weights": {"failure": "disk full", "slots": {"a/b": 1}}}}},
    "versions": [{"step": 3}, {"step": 4}],
}


@pytest.mark.parametrize(
    "text",
    [
        "epoch == 2",
        "epoch",
        "not closed",
        "closed == null",
        "nowhere.at.all == null",
        "trainer == 'running' and epoch >= 2",
        "epoch > 5 or epoch < 5",
        "not (epoch > 5 or epoch < 2)",
        "explorers.explorer-1.version.step == 5",
        "explorers.*.version.step > 4",
        "not explorers.*.version.step > 5",
        "count(explorers) == 2",
        "count(nowhere) == 0",
        "count(closed) == 0",
        "'disk' in steps.*.kinds.*.failure",
        "steps.3.kinds.weights.slots.'a/b' == 1",
        'steps.3.kinds.weights.slots."a/b" == 1',
        "versions.1.step == 4",
        "'explorer-0' in explorers",
        "epoch == 2.0",
        "-1 < epoch",
        "true",
    ],
)
def test_these_are_true(text):
    assert Condition(text)(STATE)


@pytest.mark.parametrize(
    "text",
    [
        "closed",
        "nowhere > 0",
        "nowhere < 0",
        "trainer > 3",
        "versions.7.step == 4",
        "explorers.*.version.step > 5",
        "false or null",
        "'x' in epoch",
    ],
)
def test_these_are_false(text):
    assert not Condition(text)(STATE)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", {"fault": "unexpected", "token": "the end"}),
        ("epoch ==", {"fault": "unexpected", "token": "the end"}),
        ("(epoch == 2", {"fault": "unexpected", "expected": "')'"}),
        ("epoch == 2 2", {"fault": "unexpected", "expected": "the end", "token": "2"}),
        ("__import__('os')", {"fault": "unexpected", "expected": "the end", "token": "("}),
        ("epoch; x", {"fault": "token", "token": "; x"}),
        ("and", {"fault": "unexpected", "token": "and"}),
        ("(" * 60 + "epoch" + ")" * 60, {"fault": "deep", "limit": 50}),
        ("epoch " * 1000, {"fault": "long", "limit": 2000}),
    ],
)
def test_a_mistake_is_named(text, why):
    with raises(BadExpression, condition=text, **why):
        Condition(text)


def test_it_knows_the_fields_that_it_depends_on():
    text = "count(waits) > 2 and steps.3.kinds == null or trainer == 'epoch'"
    assert Condition(text).fields == {"waits", "steps", "trainer"}


@given(st.text(alphabet="ab.*()'\"<>=! 0123-andortinu", max_size=40))
def test_any_text_is_a_condition_or_a_mistake(text):
    with suppress(BadExpression):
        assert Condition(text)(STATE) in (True, False)


@given(st.lists(st.text(alphabet="ab-_.* /09", min_size=1), min_size=1, max_size=4))
def test_a_path_in_words_leads_where_its_names_lead(names):
    document = 7
    for name in reversed(names):
        document = {name: document}
    assert Condition.values(document, format_path(names)) == [7]
