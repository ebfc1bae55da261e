"""The view of a run's progress prints what goes wrong in it as soon as the log has it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from rich.progress import Progress

from tests.support.event_histories import (
    RUN,
    History,
    lasting_cause_after_waits,
    publish_weights,
)
from trinity_events.analysis.causes import HostProcess, LiveFacts
from trinity_events.core.state import ExplorerState
from trinity_events.log import Entry
from trinity_schemas import (
    RewardErrorReported,
    RunResumed,
    StepTrained,
    TrainerStatusChanged,
    encode,
)
from trinity_workers.launch.progress import ProgressView


class Over(Exception):
    """There is nothing more to look at."""


async def show_causes(view, all_facts):
    """Show the causes of these facts, a look after the other."""
    looks = iter(all_facts)

    async def look():
        facts = next(looks, None)
        if facts is None:
            raise Over
        return facts

    with pytest.raises(Over):
        await view.show_causes(look)


def test_a_step_that_skipped_its_update_is_a_line_and_one_that_took_it_is_none(capsys):
    history = History()
    history.add(StepTrained(step=1, metrics={"reward": 0.5, "skipped_updates": 0.0}))
    history.add(StepTrained(step=2, metrics={"reward": 0.5, "skipped_updates": 1.0}))
    view = ProgressView(RUN, 2)
    for entry_id, envelope in history.entries:
        view._fold(Entry(entry_id, encode(envelope)))
    lines = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert len(lines) == 1
    assert "step 2: skipped 1 update of the policy" in lines[0]


def test_the_first_error_of_a_reward_is_shown_with_traceback_and_answer(capsys):
    error = RewardErrorReported(
        explorer="explorer-0",
        epoch=1,
        ordinal=3,
        attempt=1,
        sample=0,
        error_type="KeyError",
        place="reward.py, line 2",
        message="the reward mine raised KeyError: 'a' (reward.py, line 2)",
        traceback='Traceback\n  File "reward.py", line 2, in reward\n',
        prompt="2 + 2 =",
        response="five\x1b[31m",
    )
    history = History()
    history.add(error, by="explorer", epoch=0)
    history.add(replace(error, ordinal=4), by="explorer", rank=1, epoch=0)
    view = ProgressView(RUN, 2)
    view.epoch = 1
    for entry_id, envelope in history.entries:
        view._fold(Entry(entry_id, encode(envelope)))
    printed = capsys.readouterr().err
    assert printed.count("a reward failed") == 1, "one cause is shown once"
    assert "answer 0 to question 3: the reward mine raised KeyError" in printed
    assert '      File "reward.py", line 2, in reward' in printed
    assert "    2 + 2 =" in printed and "five" in printed
    assert "\x1b[31m" not in printed


def test_the_line_of_a_resumed_run_has_no_weights_of_the_epoch_before(capsys):
    history = History()
    publish_weights(history, 4)
    history.add(RunResumed(step=2), epoch=2)
    history.add(StepTrained(step=3, metrics={"reward": 0.5}), epoch=2)
    history.add(TrainerStatusChanged(status="running", step=3), epoch=2)
    view = ProgressView(RUN, 9, lines_every=-1.0)
    view.epoch = 2
    for entry_id, envelope in history.entries:
        view._fold(Entry(entry_id, encode(envelope)))
    with Progress(disable=True) as bar:
        view._show(bar, bar.add_task(""))
    [line] = capsys.readouterr().err.splitlines()
    assert "step 3/9" in line
    assert "weights -" in line


async def test_a_cause_that_lasts_is_one_line_and_one_that_passes_is_none(capsys):
    history = History()
    view = ProgressView(RUN, 9, look_every=0.01)
    for entry_id, envelope in history.entries:
        view._fold(Entry(entry_id, encode(envelope)))
    stopped = {"explorer-0": HostProcess(pid=7, condition="stopped")}
    view._monitor.state.explorers["explorer-0"] = ExplorerState(status="running")
    calm, hanging = LiveFacts(now=1), LiveFacts(now=1, processes=stopped)
    await show_causes(view, [hanging, calm, hanging, hanging, hanging])
    [line] = capsys.readouterr().err.splitlines()
    assert "first cause: explorer-0 (process 7 of this host) is stopped" in line


async def test_a_cause_that_lasts_is_shown_though_many_waits_of_a_moment_come_before_it(capsys):
    view = ProgressView(RUN, 9, look_every=0.01)
    for entry_id, envelope in lasting_cause_after_waits().entries:
        view._fold(Entry(entry_id, encode(envelope)))
    capsys.readouterr()
    now = int(view._monitor.state.position.partition("-")[0])
    await show_causes(view, [LiveFacts(now=now)] * 2)
    [line] = capsys.readouterr().err.splitlines()
    assert "explorer-99" in line
