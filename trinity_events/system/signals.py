"""Signals that ask a process to end."""

from __future__ import annotations

import _thread
import faulthandler
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_RETRY = 0.01
"""Seconds after which a signal is sent again, if the interpreter dropped the exit it asked for."""


def write_stacks_on_signal() -> None:
    """Write the stacks of all threads to standard error on SIGUSR1, for the rest of the process.

    The handler is C code: it also tells where a process is that never runs Python again.
    """
    with suppress(AttributeError, OSError, ValueError):  # no such signal, or no standard error
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def ending_signals() -> list[signal.Signals]:
    """Return SIGTERM and SIGHUP (a closed terminal), without those that are ignored (nohup)."""
    candidates = (signal.SIGTERM, signal.SIGHUP)
    return [number for number in candidates if signal.getsignal(number) is not signal.SIG_IGN]


def exit_on_signals() -> None:
    """Raise SystemExit in the main thread on a signal that would otherwise kill the process.

    It holds for the rest of the process. While such an exit unwinds, further signals are ignored.
    """
    _SignalExits(second_kills=False).install()


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Raise SystemExit in the block on a signal that would otherwise kill the process.

    A second signal kills the process. Blocks of other threads than the main one receive no signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    exits = _SignalExits(second_kills=True)
    exits.install()
    try:
        yield
    finally:
        exits.restore()


@asynccontextmanager
async def cancelled_by_signals(
    on_signal: Callable[[int], bool | None] = lambda _: None,
    further: Iterable[signal.Signals] = (),
) -> AsyncIterator[Callable[[], None]]:
    """Cancel the block on SIGINT, or on another signal that asks the process to end.

    Further signals do not interrupt its cleanup. Afterwards the handlers are as before. Yields a
    function that cancels the block as a signal does.

    Args:
        on_signal: Called with each signal; one for which it returns True cancels nothing.
        further: Further signals that are received.
    """
    import anyio  # loaded here, since commands handle signals before they load anything large

    numbers = (signal.SIGINT, *ending_signals(), *further)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        with anyio.open_signal_receiver(*numbers) as signals:
            async with anyio.create_task_group() as tasks:

                async def listen() -> None:
                    async for number in signals:
                        if not on_signal(number):
                            tasks.cancel_scope.cancel()

                tasks.start_soon(listen)
                yield tasks.cancel_scope.cancel
                tasks.cancel_scope.cancel()
    finally:
        # asyncio restores the default handler, not the one before.
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _SignalExit(SystemExit):
    """Exit that a signal asked for."""

    def __init__(self, number: int) -> None:
        # As a shell reports a process that a signal ended.
        super().__init__(128 + number)
        self.number = number


class _SignalExits:
    """Handlers that exit on signals, even if the interpreter drops an exit.

    An exception that leaves ``__del__``, or the callback of a weak reference or of the garbage
    collector, is dropped: the interpreter reports it to ``sys.unraisablehook`` and continues. The
    hook here has the signal sent again. An interrupt is an exit in this respect.
    """

    def __init__(self, *, second_kills: bool) -> None:
        self._second_kills = second_kills
        self._numbers: list[signal.Signals] = []
        self._dropped: int | None = None
        self._next_hook = sys.unraisablehook

    def install(self) -> None:
        self._numbers = [
            number for number in ending_signals() if signal.getsignal(number) is signal.SIG_DFL
        ]
        self._next_hook, sys.unraisablehook = sys.unraisablehook, self._on_dropped
        for number in self._numbers:
            signal.signal(number, self._exit)

    def restore(self) -> None:
        for number in self._numbers:
            # Another library may have set its own handler meanwhile.
            if signal.getsignal(number) == self._exit:
                signal.signal(number, signal.SIG_DFL)
        self._numbers = []
        # Hooks form a chain: one that was set later keeps ours as its next.
        if sys.unraisablehook == self._on_dropped:
            sys.unraisablehook = self._next_hook

    def _exit(self, number: int, _: FrameType | None) -> None:
        # A second signal during the cleanup would interrupt it halfway.
        if _unwinds(_SignalExit):
            return
        self._dropped = None
        if self._second_kills:
            signal.signal(number, signal.SIG_DFL)
        raise _SignalExit(number)

    def _on_dropped(self, unraisable: UnraisableHookArgs) -> None:
        number = self._signal_of(unraisable.exc_value)
        if number is None:
            self._next_hook(unraisable)
        elif not _unwinds(unraisable.exc_type):
            self._dropped = number
            # Not threading.Thread: its locks may be held by the code that was interrupted.
            _thread.start_new_thread(self._send_again, (number, _thread.get_ident()))
            if number in self._numbers:
                signal.signal(number, self._exit)

    def _signal_of(self, error: BaseException | None) -> int | None:
        """Return the signal that raised the error."""
        if isinstance(error, _SignalExit):
            return error.number
        return signal.SIGINT if isinstance(error, KeyboardInterrupt) else None

    def _send_again(self, number: int, main_thread: int) -> None:
        time.sleep(_RETRY)
        if self._dropped == number:  # no later signal has raised an exit
            signal.pthread_kill(main_thread, number)


def _unwinds(kind: type[BaseException]) -> bool:
    """Return True in a ``finally`` or ``except`` block that such an exception entered."""
    error, seen = sys.exception(), set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return True
        seen.add(id(error))
        error = error.__context__
    return False
