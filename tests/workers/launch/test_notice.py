"""A notice saves once, then ends the command; what is no notice ends it as before."""

import os
import signal

import anyio
import pytest

from tests.support.errors import raises
from tests.support.waits import PATIENCE
from trinity_workers.launch.lifecycle import Interrupted, interruptible
from trinity_workers.launch.notice import NOTICE_SECONDS, Notice


@pytest.fixture(autouse=True)
def handlers():
    """Signals of a test are handled as before after it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


@pytest.mark.parametrize("seconds", [None, 5.0])
async def test_a_real_signal_saves_first_and_then_interrupts_the_command(seconds):
    notice, saved = Notice(seconds), []
    number = signal.SIGUSR2 if seconds is None else signal.SIGTERM

    async def save(given: float) -> str:
        saved.append(given)
        return "the checkpoint of step 7 was complete"

    with raises(Interrupted, run_id="mine", signal=number), anyio.fail_after(PATIENCE):
        async with interruptible("mine", notice) as end, notice.saving(save, end):
            os.kill(os.getpid(), number)
            await anyio.sleep_forever()
    assert saved == [seconds or NOTICE_SECONDS]
    assert notice.sentence.endswith(": the checkpoint of step 7 was complete")


async def test_a_second_signal_and_sigint_interrupt_a_save():
    for second in (signal.SIGUSR2, signal.SIGINT):
        notice, began = Notice(None), anyio.Event()

        async def save(_: float, began=began) -> str:
            began.set()
            await anyio.sleep_forever()
            raise AssertionError

        with raises(Interrupted, signal=signal.SIGUSR2), anyio.fail_after(PATIENCE):
            async with interruptible("mine", notice) as end, notice.saving(save, end):
                os.kill(os.getpid(), signal.SIGUSR2)
                await began.wait()
                os.kill(os.getpid(), second)
                await anyio.sleep_forever()
        assert notice.sentence is None


async def test_an_error_of_the_training_comes_out_as_it_is():
    async def train() -> None:
        async with (
            interruptible("mine", Notice(None)) as end,
            Notice(None).saving(lambda _: anyio.sleep_forever(), end),
        ):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await train()
