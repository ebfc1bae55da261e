"""Pauses of an engine as events, whatever ends them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from trinity_events.weights.pauses import publish_pause
from trinity_schemas import GenerationPaused, GenerationResumed, StepRef

VERSION, BEFORE = StepRef(1, 4), StepRef(1, 3)


class Published(list):
    def publish(self, event):
        self.append(event)


class Unreachable:
    def publish(self, event):
        raise OSError("no server")


@pytest.mark.parametrize(
    ("earlier", "error", "serves"),
    [(None, None, VERSION), (None, OSError, None), (BEFORE, OSError, BEFORE)],
)
def test_the_end_of_a_pause_names_what_is_served(earlier, error, serves):
    events = Published()

    def pause():
        with publish_pause(events, VERSION, "abort", 3, 60.0) as pause:
            assert events == [
                GenerationPaused(version=VERSION, mode="abort", in_flight=3, lease=60.0)
            ]
            pause.aborted, pause.serves = 2, earlier
            if error is not None:
                raise error

    if error is None:
        pause()
    else:
        with pytest.raises(error):
            pause()
    resumed = events[1]
    assert isinstance(resumed, GenerationResumed)
    assert (resumed.version, resumed.serves, resumed.aborted) == (VERSION, serves, 2)


def test_a_pause_goes_on_although_it_cannot_be_reported():
    with publish_pause(Unreachable(), VERSION, "keep", 0, 60.0):
        entered = True
    assert entered
