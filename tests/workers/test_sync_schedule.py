"""The schedule of a style says which version serves a step, and how old its rollouts may be."""

import pytest

from trinity_workers.config.files import read_config
from trinity_workers.config.sections.sync import SyncConfig
from trinity_workers.config.train_config import TrainConfig

STYLES = ("fixed", "trainer_driven", "explorer_driven", "fully_async")


def trained(style, *, steps=40, **sync):
    """Return the staleness of each step, if each is trained on the oldest version that serves."""
    config = TrainConfig(steps=steps, sync=SyncConfig(style=style, **sync))
    asked_by: dict[int, int] = {}
    for version in (0, *(step for step in range(1, steps) if config.is_sync_step(step))):
        for step in range(version + 1, config.last_step_served(version) + 1):
            asked_by.setdefault(step, version)
    assert sorted(asked_by) == list(range(1, steps + 1)), "a step is asked for by no version"
    for step, version in asked_by.items():
        assert config.version_wanted(step) <= version < step
    return config.staleness_bound, [step - 1 - asked_by[step] for step in sorted(asked_by)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_every_step_is_asked_for_and_none_exceeds_the_bound(style, interval):
    bound, staleness = trained(style, interval=interval)
    assert max(staleness) == bound


@pytest.mark.parametrize("style", STYLES[1:])
def test_the_bound_counts_optimizer_steps(style):
    bound, staleness = trained(style, interval=3, max_staleness=4)
    assert (bound, max(staleness)) == (4, 4)


@pytest.mark.parametrize(("interval", "offset"), [(1, 0), (1, 2), (3, 0), (3, 1), (2, 5)])
def test_fixed_serves_each_explorer_step_with_the_version_of_its_formula(interval, offset):
    bound, staleness = trained("fixed", interval=interval, offset=offset)
    for step, lag in enumerate(staleness, start=1):
        version = interval * max(0, (step - 1 - offset) // interval)
        assert step - 1 - lag == version
    assert bound == max(staleness) == interval - 1 + offset


def test_a_fixed_run_that_resumes_between_two_synchronisations_keeps_to_the_schedule():
    config = TrainConfig(steps=40, sync=SyncConfig(style="fixed", interval=4, offset=1))
    assert config.last_step_served(6) == config.last_step_served(4) == 9


def test_by_default_explorers_may_be_one_version_behind():
    assert TrainConfig().staleness_bound == 1
    assert TrainConfig(sync=SyncConfig(interval=3)).staleness_bound == 5


@pytest.mark.parametrize(
    ("name", "style"),
    [
        *((style, style) for style in STYLES),
        ("dynamic_by_trainer", "trainer_driven"),
        ("dynamic_by_explorer", "explorer_driven"),
    ],
)
def test_the_names_of_trinity_rft_are_read(tmp_path, name, style):
    path = tmp_path / "run.yaml"
    path.write_text(f"sync: {{style: {name}}}\n")
    assert read_config(path).checked().sync.style == style
