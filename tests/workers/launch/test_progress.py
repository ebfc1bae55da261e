"""The view of a run's progress prints what goes wrong in it as soon as the log has it."""

from __future__ import annotations

from msgspec.structs import replace

from tests.support.event_histories import RUN, History
from trinity_events.log import Entry
from trinity_schemas import RewardErrorReported, StepTrained, encode
from trinity_workers.launch.progress import ProgressView


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
