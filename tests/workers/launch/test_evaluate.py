"""Choice of a checkpoint and of sets for `evaluate`, and the table of its results."""

import pytest
from rich.console import Console

from tests.support.errors import raises
from trinity_workers.config.sections.checkpoints import CheckpointsConfig
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.evaluation.schedule import is_due
from trinity_workers.evaluation.settings import EvaluationConfig, EvaluationSet
from trinity_workers.launch.evaluate import (
    CheckpointEvaluation,
    EvaluationRefused,
    SetResult,
    evaluation_config,
    evaluation_table,
    find_checkpoint,
    new_run_id,
)

SETS = {"a": EvaluationSet(at_end=False, interval=5), "b": EvaluationSet(at_start=False)}
CONFIG = TrainConfig(
    evaluation=EvaluationConfig(sets=SETS), checkpoints=CheckpointsConfig(interval=7)
)


def test_a_checkpoint_is_named_by_its_folder_or_by_run_and_step(tmp_path, monkeypatch):
    folder = tmp_path / "root" / "mine" / "global_step_7"
    folder.mkdir(parents=True)
    root = tmp_path / "root"
    for name in ("mine/7", "mine/global_step_7", str(folder)):
        assert find_checkpoint(name, root) == folder
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("root/mine", root) == tmp_path / "root" / "mine"
    with raises(EvaluationRefused, fault="checkpoint", name="mine/8", root=root):
        find_checkpoint("mine/8", root)


def test_each_chosen_set_is_due_in_a_run_that_trains_and_saves_nothing():
    for names in ([], ["b"], ["b", "a"]):
        config = evaluation_config(CONFIG, names)
        assert config.evaluation.sets.keys() == set(names or SETS)
        assert (config.steps, config.checkpoints.interval) == (0, 0)
        for settings in config.evaluation.sets.values():
            assert is_due(settings, 0, before=None, steps=0, keeps_versions=False)
    assert config.prompts_open(begun=0, version=0, oldest_named=None) == 0


def test_sets_that_there_are_not_are_refused():
    with raises(EvaluationRefused, fault="set", name="c", sets=("a", "b")):
        evaluation_config(CONFIG, ["a", "c"])
    with raises(EvaluationRefused, fault="sets"):
        evaluation_config(CONFIG.replaced("evaluation", sets={}), [])


def test_two_runs_of_one_second_have_different_ids():
    assert len({new_run_id("mine") for _ in range(8)}) == 8


@pytest.mark.parametrize("error", [None, "no [answer] came"])
def test_the_table_has_each_metric_with_its_interval_or_the_reason(error):
    metrics = {"mean": 0.5, "mean_low": 0.25, "mean_high": 0.75, "reward_errors": 2.0}
    done = SetResult(name="a", metrics=metrics, answers=1200, seconds=3.25)
    evaluation = CheckpointEvaluation(
        run_id="r",
        checkpoint="/x",
        sets=[done, *[SetResult(name="b", error=error)] * bool(error)],
    )
    assert evaluation.has_failed is bool(error)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(evaluation_table(evaluation))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert "a mean 0.5 0.25 to 0.75 1,200 3.2 s" in lines
    assert "a reward_errors 2 1,200 3.2 s" in lines
    assert bool(error) == ("b FAILED: no [answer] came" in lines)
