"""Versions that are evaluated: by interval, by choice, at the start and at the end, each once."""

import pytest

from trinity_workers.evaluation.schedule import is_due
from trinity_workers.evaluation.settings import EvaluationSet


def evaluated(published, steps=30, before=None, **settings):
    """Return the steps whose versions are evaluated, of those that are published in order."""
    due_steps = []
    for step in published:
        if is_due(EvaluationSet(**settings), step, before=before, steps=steps):
            due_steps.append(step)
            before = step
    return due_steps


EACH = range(31)


def test_by_default_the_first_and_the_last_version_are_evaluated():
    assert evaluated(EACH) == [0, 30]


def test_an_interval_takes_its_multiples():
    assert evaluated(EACH, interval=10) == [0, 10, 20, 30]


def test_the_first_version_after_a_multiple_is_taken_where_there_is_none_at_it():
    assert evaluated(range(0, 31, 4), interval=10, at_end=False) == [0, 12, 20]


def test_chosen_versions_are_taken_or_the_next_ones_after_them():
    chosen = {"versions": (7, 8, 20), "at_start": False, "at_end": False}
    assert evaluated(EACH, **chosen) == [7, 8, 20]
    assert evaluated([0, 5, 10, 20, 30], **chosen) == [10, 20]
    assert evaluated([0, 5], versions=(0,), at_start=False) == [0]


def test_a_resumed_run_repeats_no_version_and_leaves_none_out():
    assert evaluated(range(20, 31), before=20, interval=10) == [30]
    assert evaluated(range(20, 31), before=10, interval=10) == [20, 30]
    assert evaluated(range(20, 31), before=10, versions=(12,)) == [20, 30]
    assert evaluated([30, 40], before=30, steps=40) == [40], "a run that is extended"


@pytest.mark.parametrize(("at_start", "due"), [(None, False), (False, False), (True, True)])
def test_a_method_that_keeps_no_version_has_its_first_one_evaluated_only_if_told(at_start, due):
    settings = EvaluationSet(at_start=at_start)
    assert is_due(settings, 0, before=None, steps=9, keeps_versions=False) is due
