"""Categories of events: the index of a run's log needs one for each event."""

from trinity_events.dashboard.categories import CATEGORY, find_step
from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    EVENT_TYPES,
    ResendRequested,
    StepRef,
    SyncRequested,
)


def test_every_event_and_announcement_has_a_category():
    assert set(CATEGORY) == {*EVENT_TYPES, *ANNOUNCEMENT_TYPES}, "see dashboard/categories.py"


def test_an_event_is_about_the_step_by_which_tail_finds_it():
    assert find_step(ResendRequested(version=StepRef(1, 4))) == 4
    assert find_step(SyncRequested(oldest_version=StepRef(1, 5))) == 5
    assert find_step(SyncRequested()) is None
