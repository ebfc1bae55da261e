"""Steps that are profiled leave a trace on each rank that Perfetto reads, and an event names it."""

from __future__ import annotations

import gzip
import json

import pytest

torch = pytest.importorskip("torch")

from trinity_events.analysis.event_filter import find_steps  # noqa: E402
from trinity_workers.trainer.workers.profiling import StepProfiler  # noqa: E402


@pytest.fixture
def profiled(make_config):
    """Runs steps as one rank; returns the events, the run's folder and the results."""

    def run(rank, steps, **settings):
        config = make_config(trainer={"ranks": 2} | settings, steps=9)
        events = []
        profiler = StepProfiler(config, "actor", rank, events.append)
        for step in steps:
            with profiler.step(step):
                torch.ones(4, 4).matmul(torch.ones(4, 4))
        return events, config.checkpoint_folder

    return run


def test_a_trace_of_each_profiled_step_is_below_the_runs_folder_and_named(profiled):
    events, folder = profiled(1, range(1, 5), profile_steps=[2, 4])
    assert [(event.step, event.path) for event in events] == [
        (step, f"profiles/step_{step}_actor_1.json.gz") for step in (2, 4)
    ]
    assert {path.name for path in (folder / "profiles").iterdir()} == {
        event.path.removeprefix("profiles/") for event in events
    }
    for event in events:
        assert find_steps(event) == {event.step}
        file = folder / event.path
        assert file.stat().st_size == event.bytes
        trace = json.loads(gzip.decompress(file.read_bytes()))
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {f"training step {event.step}", "aten::matmul"} <= names


def test_ranks_that_are_not_asked_for_trace_nothing(profiled):
    events, folder = profiled(1, (1, 2), profile_steps=[1], profile_ranks=[0])
    assert (events, (folder / "profiles").exists()) == ([], False)
    assert len(profiled(0, (1, 2), profile_steps=[1], profile_ranks=[0])[0]) == 1


def test_a_trace_that_cannot_be_written_is_a_warning_and_training_goes_on(profiled, caplog):
    _, folder = profiled(0, ())
    folder.mkdir(exist_ok=True)
    (folder / "profiles").write_text("a file is in the way")
    events, _ = profiled(0, (1,), profile_steps=[1])
    assert events == []
    assert "the profile of step 1 is not written" in caplog.text
