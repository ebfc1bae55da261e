"""What differs in a resumed epoch is part of its state, and of what people read."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from tests.support.event_histories import History
from trinity_events.analysis.timeline import Moment, Timeline
from trinity_events.core.resumptions import format_changes, format_resumption
from trinity_events.views.status import status_panel
from trinity_schemas import RunOpened, RunResumed, SettingChange, SkippedCheckpoint

RATE = SettingChange(name="trainer.learning_rate", before="0.001", after="0.00001")
SKIPPED = SkippedCheckpoint(step=9, reason="/root/run/global_step_9/model.pt was changed")
RESUMED = RunResumed(step=7, changed=(RATE,), skipped=(SKIPPED,))


def resumed():
    history = History()
    history.add(RESUMED, by="launcher", epoch=2)
    return history


def test_the_state_has_what_the_current_epoch_changed_and_passed_over():
    history = resumed()
    state = history.fold()[0].state
    assert (state.changed_settings, state.skipped_checkpoints) == ([RATE], [SKIPPED])
    history.add(RunOpened(), by="next", epoch=3)
    state = history.fold()[0].state
    assert (state.changed_settings, state.skipped_checkpoints) == ([], [])


def test_it_is_told_in_sentences_and_in_the_status():
    state = resumed().fold()[0].state
    lines = format_resumption(state)
    assert lines == [
        f"The resume passed over the checkpoint of step 9: {SKIPPED.reason}.",
        "The resume changed trainer.learning_rate from 0.001 to 0.00001.",
    ]
    out = StringIO()
    Console(file=out, width=200).print(status_panel(state))
    for line in lines:
        assert line in out.getvalue()


def test_a_moment_of_the_timeline_has_it():
    timeline = Timeline()
    parts = [part for at, envelope in resumed().entries for part in timeline.add(at, envelope)]
    [moment] = [part for part in parts if isinstance(part, Moment) and part.facts]
    assert moment.facts == {
        "trainer.learning_rate": "0.001 -> 0.00001",
        "skipped step 9": SKIPPED.reason,
    }


def test_many_changes_and_long_values_are_cut_where_people_read():
    changes = [SettingChange(name=f"s{index}", after="x" * 500) for index in range(100)]
    assert format_changes(changes).endswith(" and 84 more")
    assert len(format_changes(changes)) < 2000
