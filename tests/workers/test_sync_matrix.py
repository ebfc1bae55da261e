"""Which methods, styles and policies go together: the file says it, before a run is opened."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import yaml

from trinity_workers.config.errors import BadSettings
from trinity_workers.config.files import read_config
from trinity_workers.config.sections.sync import SyncMethod, SyncStyle, WhenStale
from trinity_workers.config.sections.trainer import EngineName

ENGINES, METHODS, STYLES, POLICIES = (
    get_args(choice) for choice in (EngineName, SyncMethod, SyncStyle, WhenStale)
)
REFUSED = {("nccl", "fully_async"): "a collective group makes the trainer wait"}
"""Methods with the styles that they cannot serve, and the beginning of the reason."""


def mistakes(folder: Path, engine: str, **sync: object) -> list[BadSettings]:
    file = folder / "run.yaml"
    settings = {"model": {"dtype": "bfloat16"}, "trainer": {"engine": engine}, "sync": sync}
    file.write_text(yaml.safe_dump(settings))
    return read_config(file).problems


@pytest.mark.parametrize("engine", ENGINES)
def test_every_method_goes_with_every_style_but_those_that_are_refused_with_the_reason(
    tmp_path, engine
):
    refusals = {}
    for method, style, policy in product(METHODS, STYLES, POLICIES):
        chosen = {} if style == "fixed" else {"when_stale": policy}  # fixed asks in time
        problems = mistakes(tmp_path, engine, method=method, style=style, **chosen)
        for problem in problems:
            refusals[method, style] = problem.sentence
            assert {"sync.method", "sync.style"} & {*problem.settings}, problem
    assert refusals.keys() == REFUSED.keys()
    assert all(reason in refusals[pair] for pair, reason in REFUSED.items())


@pytest.mark.parametrize("style", STYLES)
def test_only_fixed_has_an_offset(tmp_path, style):
    problems = mistakes(tmp_path, "fsdp", style=style, offset=1)
    assert (problems == []) is (style == "fixed")
    assert all(problem.settings[0] == "sync.offset" for problem in problems)


@pytest.mark.parametrize(("style", "interval"), list(product(STYLES, (1, 4))))
def test_a_bound_that_no_step_can_keep_to_is_refused(tmp_path, style, interval):
    least = interval - 1
    assert mistakes(tmp_path, "fsdp", style=style, interval=interval, max_staleness=least) == []
    if least:
        [problem] = mistakes(
            tmp_path, "fsdp", style=style, interval=interval, max_staleness=least - 1
        )
        assert problem.settings[0] == "sync.max_staleness"
        assert f"choose at least {least}" in problem.sentence
