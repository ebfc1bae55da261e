"""The view of a run's progress prints what goes wrong in it as soon as the log has it."""

from __future__ import annotations

from tests.support.event_histories import RUN, History
from trinity_events.log import Entry
from trinity_schemas import StepTrained, encode
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
