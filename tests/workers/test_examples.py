"""Every example of `train` is a whole configuration that this version takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_workers.config.files import read_config
from trinity_workers.tasks import is_built_in

ROOT = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted((ROOT / "train").glob("*.yaml"))


@pytest.mark.parametrize(
    "path", [*EXAMPLES, *sorted((ROOT / "own_task").glob("*.yaml"))], ids=lambda p: p.stem
)
def test_an_example_has_no_mistake(path):
    assert read_config(path).problems == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_of_train_needs_nothing_that_is_not_beside_it(path):
    config = read_config(path).checked()
    assert config.model.path is None
    assert is_built_in(config.task.name) and config.task.questions is None
    assert config.checkpoints.root is None
    if config.rewards.function is not None:
        assert Path(config.rewards.function.partition(":")[0]).is_file()
    if config.task.name == "sort-digits":  # the default cuts its answers off
        assert config.rollouts.max_new_tokens == 11


def test_no_two_examples_have_the_same_name():
    names = [read_config(path).checked().name for path in EXAMPLES]
    assert None not in names
    assert len(set(names)) == len(names) > 5
