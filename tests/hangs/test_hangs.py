"""A few of the planted hangs; ``make hangs`` plants all of them."""

import pytest

from tests.hangs.__main__ import AT_LEAST, perform
from tests.hangs.plants import PLANTS

pytestmark = pytest.mark.timeout(600)
BY_NAME = {plant.name: plant for plant in PLANTS}


@pytest.mark.processes
@pytest.mark.server
@pytest.mark.parametrize("name", ["explorer-stopped", "save-killed", "folder-in-the-way"])
def test_explain_names_the_first_cause_of_a_planted_hang(name):
    named = perform(BY_NAME[name])
    assert named.right, named.cause


def test_forty_hangs_and_more_are_planted_once_each():
    assert len(BY_NAME) == len(PLANTS) >= 40
    assert AT_LEAST * 40 == 38


def test_an_answer_that_names_another_process_or_nothing_counts_as_missed():
    plant = BY_NAME["explorer-stopped"]
    first = {"reason": "stopped", "process": "explorer-1", "sentence": "the rollouts of 0"}
    assert plant.is_named({"causes": [first]})
    assert not plant.is_named({})
    assert not plant.is_named({"causes": [first | {"process": "explorer-2"}, first]})
    assert not plant.is_named({"causes": [first | {"reason": "waits"}]})
