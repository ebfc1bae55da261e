"""A notice saves once, then ends the command; what is no notice ends it as before."""

import signal

import anyio

from tests.support.waits import PATIENCE
from trinity_workers.launch.notice import NOTICE_SECONDS, Notice


async def run_until_end(notice: Notice, number: int) -> list[float]:
    """Send a signal while a run trains; return the seconds that its save was given."""
    given: list[float] = []
    ended = anyio.Event()

    async def save(seconds: float) -> str:
        given.append(seconds)
        return "saved"

    with anyio.fail_after(PATIENCE):
        async with notice.saving(save, ended.set):
            assert notice.receive(number)
            assert not notice.receive(number), "a second one ends the command at once"
            await ended.wait()
    return given


async def test_sigusr2_saves_within_a_minute_or_what_the_setting_says():
    notice = Notice(None)
    assert await run_until_end(notice, signal.SIGUSR2) == [NOTICE_SECONDS]
    assert notice.sentence == "SIGUSR2 announced the end: saved"
    assert await run_until_end(Notice(5.0), signal.SIGTERM) == [5.0]


async def test_other_signals_and_other_times_are_no_notice():
    notice = Notice(None)
    assert not notice.receive(signal.SIGUSR2), "nothing trains yet"

    async def save(_: float) -> str:
        raise AssertionError("no notice came")

    async with notice.saving(save, lambda: None):
        assert not notice.receive(signal.SIGTERM)
        assert not notice.receive(signal.SIGINT)
    assert not notice.receive(signal.SIGUSR2), "nothing trains any more"
    assert notice.sentence is None
