"""``plot``: metrics of a run over its steps, as a picture."""

import re

import pytest

from tests.support.errors import raises
from trinity_events.views.plot import Curves, PlotUnusable
from trinity_schemas import StepTrained


async def test_a_picture_has_a_panel_for_each_metric(cli, publisher, run_id, tmp_path):
    pytest.importorskip("matplotlib")
    for step in range(1, 6):
        await publisher.publish(StepTrained(step=step, metrics={"loss": 1 / step, "reward": 0.5}))
    picture = tmp_path / "run.svg"
    shown = cli("plot", run_id, "--output", str(picture))
    assert (shown.returncode, shown.stderr, shown.stdout) == (0, "", f"{picture}\n")
    named = re.findall(r"<!-- (\w+/\w+) -->", picture.read_text())
    assert {"rollout/reward", "train/loss"} == set(named)


async def test_a_metric_that_the_run_lacks_is_refused_with_those_it_has(
    cli, publisher, run_id, tmp_path
):
    await publisher.publish(StepTrained(step=1, metrics={"loss": 1.0}))
    shown = cli("plot", run_id, "--metric", "los", "--output", str(tmp_path / "run.svg"))
    assert shown.returncode == 1
    assert shown.stderr == "error: there are no metrics los: this run has train/loss\n"


def test_steps_that_do_not_stand_are_not_drawn():
    curves = Curves()
    for step in (1, 2, 3):
        curves.add(step, {"train/loss": float(step)})
    curves.cut_after(1)
    curves.add(2, {"train/loss": 9.0})
    assert curves.matching(["train"]) == {"train/loss": [(1, 1.0), (2, 9.0)]}
    with raises(PlotUnusable, fault="metric"):
        curves.matching(["perf"])
