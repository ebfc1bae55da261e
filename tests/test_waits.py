"""Long waits are events; short ones are none."""

import threading
import time

import anyio
import pytest

from tests.support.published_waits import PublishedWaits
from tests.support.waits import PATIENCE, until, wait_until
from trinity_events.diagnostics.waits import MOST_REPORTED, WaitReporter
from trinity_events.errors import DeadlineExceeded
from trinity_schemas import WaitEnded, WaitStarted

SHORT = 0.05


@pytest.fixture
def published():
    return PublishedWaits()


@pytest.fixture
def reporter(published):
    return WaitReporter(published, threshold=SHORT)


def last(wait):
    """Go on with a wait until it was reported."""
    wait_until(lambda: wait.reported_at is not None, "it was not reported")


def test_a_wait_that_lasts_is_told_at_its_beginning_and_at_its_end(published, reporter):
    with reporter.waiting("rollouts", ["explorer-3"], deadline=60.0) as wait:
        last(wait)
    [started, ended] = published.events
    assert (started.what, started.waits_for, started.deadline) == (
        "rollouts",
        ("explorer-3",),
        60.0,
    )
    assert started.seconds >= SHORT
    assert (ended.wait_id, ended.outcome) == (started.wait_id, "over")
    assert ended.seconds >= started.seconds


def test_short_waits_tell_nothing(published):
    reporter = WaitReporter(published, threshold=PATIENCE)
    for _ in range(1000):
        with reporter.waiting("rollouts") as wait:
            wait.update("other rollouts", ["explorer-0"])
    assert published.events == []
    assert reporter._thread.is_alive()


def test_a_reporter_without_a_publisher_has_no_thread():
    reporter = WaitReporter(None)
    with reporter.waiting("rollouts") as wait:
        wait.update("other rollouts")
    assert reporter._thread is None


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (DeadlineExceeded("nothing came", 1.0), "deadline"),
        (TimeoutError(), "deadline"),
        (OSError(), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
    ],
)
def test_a_wait_that_an_error_ends_is_told_too(published, reporter, error, outcome):
    def wait_in_vain():
        with reporter.waiting("rollouts") as wait:
            last(wait)
            raise error

    with pytest.raises(type(error)):
        wait_in_vain()
    assert [event.outcome for event in published.of(WaitEnded)] == [outcome]


async def test_a_cancelled_wait_of_a_task_is_told(published, reporter):
    with anyio.move_on_after(PATIENCE) as scope, reporter.waiting("rollouts") as wait:
        await until(lambda: wait.reported_at is not None)
        scope.cancel()
        await anyio.sleep(PATIENCE)
    assert [event.outcome for event in published.of(WaitEnded)] == ["cancelled"]


def test_another_culprit_is_told_under_the_same_name_but_not_each_time(published):
    reporter = WaitReporter(published, threshold=SHORT)
    with reporter.waiting("rollouts", ["explorer-0"]) as wait:
        last(wait)
        for number in range(1000):
            wait.update("rollouts", [f"explorer-{number}"])
        wait_until(lambda: published.of(WaitStarted)[-1].waits_for == ("explorer-999",))
    started = published.of(WaitStarted)
    assert {event.wait_id for event in started} == {wait.wait_id}
    assert 2 <= len(started) < 100
    assert len(published.of(WaitEnded)) == 1


def test_a_wait_that_goes_on_is_renewed(published):
    reporter = WaitReporter(published, threshold=SHORT, renewal=SHORT)
    with reporter.waiting("rollouts"):
        wait_until(lambda: len(published.of(WaitStarted)) > 2)
    durations = [event.seconds for event in published.of(WaitStarted)]
    assert durations == sorted(durations)


def test_a_publisher_without_room_does_not_disturb_a_wait(published, reporter):
    published.refuses = True
    with reporter.waiting("rollouts") as wait:
        wait_until(lambda: wait.due > wait.began + 3 * SHORT)
        assert wait.reported_at is None
        published.refuses = False
        last(wait)
        published.refuses = True
    assert len(published.events) == 1


def test_only_so_many_waits_are_told_at_a_time(published, reporter):
    def wait_for(number, go):
        with reporter.waiting(f"reward {number}"):
            go.wait(PATIENCE)

    goes = [threading.Event() for _ in range(MOST_REPORTED + 4)]
    threads = [
        threading.Thread(target=wait_for, args=(number, go)) for number, go in enumerate(goes)
    ]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(published.of(WaitStarted)) == MOST_REPORTED)
        descriptions = {event.what for event in published.of(WaitStarted)}
        first = int(min(descriptions).split()[1])
        goes[first].set()
        wait_until(lambda: len(published.of(WaitStarted)) == MOST_REPORTED + 1)
    finally:
        for go in goes:
            go.set()
        for thread in threads:
            thread.join()
    assert len(published.of(WaitEnded)) == len(published.of(WaitStarted)) <= MOST_REPORTED + 4


def test_a_wait_that_begins_as_the_thread_is_about_to_end_is_told(published):
    reporter = WaitReporter(published, threshold=SHORT, idle_rounds=1)
    for delay in range(10):
        with reporter.waiting("short"):
            pass
        time.sleep(delay * SHORT / 4)  # one of them is the last round of the thread
        with reporter.waiting("long") as wait:
            last(wait)


def test_the_thread_of_a_reporter_without_waits_ends(published, reporter):
    with reporter.waiting("rollouts"):
        thread = reporter._thread
        assert thread.is_alive()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    with reporter.waiting("rollouts") as wait:
        last(wait)
