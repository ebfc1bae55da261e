"""The runs of `make learn`: their plan, their figures, and a short pair of them."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from benchmarks.environment import HERE
from benchmarks.learning import page
from benchmarks.learning.plan import ALONE, LearningRun, plan
from benchmarks.learning.results import LearningResult, Measured, Results
from benchmarks.learning.running import perform, write_settings
from benchmarks.learning.statistics import band, level, paired_differences, t_interval
from tests.support.waits import PATIENCE
from trinity_workers.algorithms.presets import merged
from trinity_workers.config.files import read_config


def result(way: str, seed: int, *shares: float, family: str = "spell-backward") -> LearningResult:
    return LearningResult(
        name=f"{family}-{way}-{seed}",
        family=family,
        way=way,
        seed=seed,
        settings="steps: 2\n",
        curve=[
            Measured(step=25 * place, exact=share, rewarded=share, answers=1024)
            for place, share in enumerate(shares)
        ],
        staleness=None if way == ALONE else 0.5,
        warm_up_steps=80,
    )


def test_the_plan_has_fewer_than_fifty_runs_each_with_a_name_of_its_own():
    runs = list(plan())
    assert len({run.name for run in runs}) == len(runs) < 50
    combinations = {(run.family, run.way) for run in runs}
    for family in ("spell-backward", "sort-digits", "complex-sums"):
        assert {(family, way) for way in (ALONE, "fixed", "fully_async")} <= combinations
    # Every way has every seed.
    assert len(runs) == 3 * len(combinations)


def test_each_file_of_the_plan_is_one_that_train_takes(tmp_path):
    results = Results(tmp_path)
    configs = {}
    for run in plan():
        config = read_config(write_settings(run, results)).checked()
        assert config.is_save_step(25) and config.is_save_step(config.steps)
        configs[run.name] = config
    common = {
        (config.algorithm.loss, config.trainer, config.rollouts.samples_per_prompt, config.steps)
        for config in configs.values()
    }
    assert len(common) == 1
    assert configs["spell-backward-bound-4-0"].sync.max_staleness == 4
    weights = {
        name: configs[f"spell-backward-{name}-0"].algorithm.importance_sampling.weights
        for name in ("bound-4", "bound-4-uncorrected")
    }
    assert weights == {"bound-4": "token", "bound-4-uncorrected": "none"}


@pytest.mark.heavy
@pytest.mark.processes
def test_a_finished_run_is_listed_and_not_trained_again(tmp_path):
    results = Results(tmp_path)
    for run in plan():
        finished = result(run.way, run.seed, 0.2, 0.4, family=run.family)
        results.write(msgspec.structs.replace(finished, name=run.name))
    command = [sys.executable, "-m", "benchmarks.learning", "--folder", str(tmp_path)]

    def output_of(*more: str) -> str:
        done = subprocess.run(
            [*command, *more], cwd=HERE, env=os.environ, capture_output=True, text=True,
            timeout=2 * PATIENCE, check=True,
        )  # fmt: skip
        return done.stdout + done.stderr

    assert f"{len(list(plan()))} of {len(list(plan()))} runs are finished" in output_of()
    (tmp_path / "sort-digits-fixed-1.json").unlink()
    lines = output_of("--list", "--only", "sort-digits-fixed").splitlines()
    assert [line.split() for line in lines] == [
        ["sort-digits-fixed-0", "finished"],
        ["sort-digits-fixed-1", "-"],
        ["sort-digits-fixed-2", "finished"],
    ]


def test_differences_are_paired_by_seed_and_their_interval_is_students():
    alone = [result(ALONE, seed, 0.2, 0.5 + seed / 10) for seed in range(3)]
    ours = [
        result("fixed", seed, 0.2, 0.5 + seed / 10 + gain)
        for seed, gain in enumerate((0.01, 0.02, 0.03))
    ]
    differences = paired_differences(ours, alone)
    # The level is the mean of the last three measurements, or of the two that there are.
    assert differences == pytest.approx([0.005, 0.01, 0.015])
    interval = t_interval(differences)
    assert interval.mean == pytest.approx(0.01)
    assert interval.half == pytest.approx(4.303 * 0.005 / 3**0.5)
    assert interval.shown(signed=True) == "+0.010 ± 0.012"
    assert t_interval([0.25]).shown() == "0.250"
    assert paired_differences(ours, alone[:1]) == pytest.approx([0.005])


def test_a_band_has_the_mean_and_the_outermost_seeds():
    points = band([result("fixed", 0, 0.1, 0.4), result("fixed", 1, 0.3, 0.8)])
    assert [point[0] for point in points] == [0, 25]
    assert [bound for point in points for bound in point[1:]] == pytest.approx(
        [0.2, 0.1, 0.3, 0.6, 0.4, 0.8]
    )
    assert level(result("fixed", 0, 0.0, 0.1, 0.2, 0.3)) == pytest.approx(0.2)


def test_the_page_says_of_every_run_whether_it_is_in():
    some_results = [result(ALONE, 0, 0.2, 0.5), result("fixed", 0, 0.2, 0.6)]
    files = page.written(some_results)
    text = files[page.PAGE]
    assert "2 of 48" in text
    assert "| spell-backward | one process | in | not yet | not yet |" in text
    assert "| spell-backward | `fixed` | 0 | 0.200 | 0.400 | +0.050 | 0.50 |" in text
    assert "| complex-sums | `fixed` | not yet |" in text
    drawings = [text for path, text in files.items() if path.suffix == ".svg"]
    assert len(drawings) == 3
    for drawing in drawings:
        assert ET.fromstring(drawing).tag.endswith("svg")


def test_the_page_lags_behind_no_result_that_is_kept():
    for path, text in page.written(page.read_stored()).items():
        assert path.read_text() == text, f"{path.name}: python -m benchmarks.learning --keep"


SHORT = {
    "steps": 4,
    "rollouts": {"prompts_per_step": 4, "samples_per_prompt": 4},
    "checkpoints": {"interval": 2},
}


def short(way: str, more: dict) -> LearningRun:
    planned = next(run for run in plan() if run.way == way and run.family == "spell-backward")
    return msgspec.structs.replace(planned, settings=merged(planned.settings, merged(SHORT, more)))


def learned(way: str, folder: Path, more: dict) -> LearningResult:
    pytest.importorskip("torch")
    pytest.importorskip("reasoning_gym")
    results = Results(folder)
    done = perform(short(way, more), results)
    assert results.read(done.name) == done
    return done


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_one_process_learns(tmp_path):
    steps = {
        "steps": 30,
        "trainer": {"schedule": "constant"},
        "rollouts": {"prompts_per_step": 16, "samples_per_prompt": 16},
    }
    done = learned(ALONE, tmp_path, merged(steps, {"checkpoints": {"interval": 30}}))
    start, end = done.curve
    assert (start.step, end.step, end.answers) == (0, 30, 1024)
    assert done.staleness is None
    # From 0.26 to 0.31 in 25 steps.
    assert end.exact > start.exact + 0.02


@pytest.mark.nightly("benchmarks/test_learning.py::test_one_process_learns")
@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_the_pipeline_on_policy_learns_what_one_process_learns(tmp_path):
    piped, alone = (learned(way, tmp_path / way, {}) for way in ("fixed", ALONE))
    assert (
        [point.step for point in piped.curve] == [point.step for point in alone.curve] == [0, 2, 4]
    )
    assert piped.staleness == 0.0
    assert piped.warm_up_steps == alone.warm_up_steps
    # They start from the same weights, and sample the same answers to the same questions. Ranks
    # and batches differ in the last bits alone.
    assert piped.curve[0] == alone.curve[0]
    for ours, theirs in zip(piped.curve, alone.curve, strict=True):
        assert ours.exact == pytest.approx(theirs.exact, abs=0.03)
