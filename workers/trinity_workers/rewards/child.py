"""Process that runs a user's reward function, and the messages that it is sent.

It reads frames from its standard input, and writes frames to what was its standard output. What the
user's code prints goes to standard error, so it never mixes with answers.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct, structs

from trinity_events.errors import TrinityError

from ..sandbox.processes.frames import framed, open_frame_pipes, read_frame
from ..tasks import Answer, Question, TrainingSet, load_reward
from .values import NO_REWARD, Rewarded, RewardFault, rewarded

_LONGEST_TRACEBACK = 6000
"""Characters of a traceback, of which the end is kept: the innermost frames name the fault."""
_LONGEST_MESSAGE = 300
"""Characters of an error's own message, in its sentence."""
_SELF_END = 4.0
"""Deadlines after which the process ends itself: its parent, which would, may be dead."""


class RewardSource(Struct, frozen=True, kw_only=True):
    """Names by which a process finds the reward function."""

    reward: str | None
    """Configured name; None takes the reward of the task, or of the family of its questions."""
    task: str
    questions: str | None = None
    sets: dict[str, TrainingSet] = {}
    seed: int = 0
    options: dict[str, Any] = {}
    folder: str = "."
    """Directory that relative names start from."""
    deadline: float = 30.0
    """Seconds that one answer's reward may take."""

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return self.reward or self.questions or " + ".join(self.sets) or self.task


class Judge(Struct, frozen=True, kw_only=True):
    """Request for the rewards of answers to one question."""

    question: Question
    answers: list[Answer]


class Verdict(Struct, frozen=True, kw_only=True):
    """Reward of one answer, or the error of the function."""

    index: int = -1
    """Place of the answer; -1 after the function was loaded."""
    rewarded: Rewarded | None = None
    fault: RewardFault | None = None


def encoded(message: Struct) -> bytes:
    """Return the frame of a message: JSON, for MessagePack refuses large integers."""
    return framed(msgspec.json.encode(message))


def main() -> None:
    """Serve frames until standard input ends."""
    frames, answers = open_frame_pipes()
    source = _read(frames, RewardSource)
    if source is None:
        return

    def send(verdict: Verdict) -> None:
        answers.write(encoded(verdict))
        answers.flush()

    try:
        function = load_reward(
            source.reward,
            task=source.task,
            questions=source.questions,
            sets=source.sets,
            seed=source.seed,
            options=source.options,
            folder=Path(source.folder),
        )
    except TrinityError as error:
        send(Verdict(fault=RewardFault(sentence=str(error), error_type=type(error).__name__)))
        return
    send(Verdict())
    # One loop for the life of the process: what a coroutine function makes once, such as a
    # semaphore or a client's connections, belongs to the loop in which it was first used. It is
    # not the thread's own, which a function may set, run and close. anyio's portal would run it
    # in another thread than that of the file's import: see decision 50.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        while (request := _read(frames, Judge)) is not None:
            try:
                _judge(runner, function, request, source.deadline, send)
            finally:
                # Between two questions the process waits for as long as training does.
                faulthandler.cancel_dump_traceback_later()


def _read(frames: BinaryIO, kind: Any) -> Any:
    payload = read_frame(frames)
    return None if payload is None else msgspec.json.decode(payload, type=kind)


def _judge(
    runner: asyncio.Runner,
    function: Callable[..., Any],
    request: Judge,
    deadline: float,
    send: Callable[[Verdict], None],
) -> None:
    """Send a verdict on each answer; those that are awaited are judged side by side.

    The function is called while no loop runs, so that it may run one itself. A coroutine function
    does nothing before its coroutine is awaited.
    """
    awaited = []
    for index, answer in enumerate(request.answers):
        # Each call replaces the timer of the one before (faulthandler).
        _end_after(deadline)
        try:
            value = function(request.question, answer)
        except BaseException as error:  # all that ends the function is its fault, not the process's
            send(Verdict(index=index, fault=_raised(error)))
            continue
        if inspect.isawaitable(value):
            awaited.append(_await_verdict(index, value, deadline, send))
        else:
            send(_verdict(index, value))
    if awaited:
        runner.run(_gather(awaited))


async def _gather(verdicts: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for verdict in verdicts:
            tasks.create_task(verdict)


async def _await_verdict(
    index: int, value: Awaitable[Any], deadline: float, send: Callable[[Verdict], None]
) -> None:
    _end_after(deadline)
    limit = asyncio.timeout(deadline)
    try:
        async with limit:
            result = await value
    except BaseException as error:  # a cancelled task too: without a verdict its parent waits
        fault = _raised(error)
        # The user's code may raise a TimeoutError of its own.
        if isinstance(error, TimeoutError) and limit.expired():
            late = f"did not return within {deadline:g} s"
            fault = structs.replace(fault, sentence=late, place="")
        send(Verdict(index=index, fault=fault))
    else:
        send(_verdict(index, result))


def _end_after(deadline: float) -> None:
    """End this process if it judges for long: in C, for code that holds the interpreter."""
    faulthandler.dump_traceback_later(_SELF_END * deadline, exit=True)


def _verdict(index: int, value: object) -> Verdict:
    try:
        return Verdict(index=index, rewarded=rewarded(value))
    except ValueError as error:
        sentence = _to_unicode(str(error))
        return Verdict(index=index, fault=RewardFault(sentence=sentence, error_type=NO_REWARD))


def _raised(error: BaseException) -> RewardFault:
    """Return the error, with the line of the user's code that raised it."""
    name, message = type(error).__name__, _format_message(error)
    own_code = _skip_own_frames(error.__traceback__)
    frames = traceback.extract_tb(own_code)
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    summary = " ".join(f"{name}: {message}".split()).removesuffix(":")[:_LONGEST_MESSAGE]
    # Without the frames of this file, which are in every traceback and say nothing.
    lines = "".join(traceback.format_exception(type(error), error, own_code))
    return RewardFault(
        sentence=_to_unicode(f"raised {summary}{f' ({place})' if place else ''}"),
        error_type=name,
        place=_to_unicode(place),
        traceback=_to_unicode(lines[-_LONGEST_TRACEBACK:]),
    )


def _skip_own_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _format_message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of a __str__ of the user's own
        return "its message cannot be formatted"


def _to_unicode(text: str) -> str:
    """Return a text without single surrogates, which no message can hold."""
    return text.encode("utf-8", "replace").decode()
