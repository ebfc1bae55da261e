"""An environment replies from a process of its own, which may hang, die or lie."""

import os
import re
import signal

import anyio
import pytest

from tests.support.errors import raises
from tests.support.pipeline import PATIENCE, until
from tests.support.published_waits import PublishedWaits
from trinity_events.diagnostics.waits import WaitReporter
from trinity_schemas import WaitEnded, WaitStarted
from trinity_workers.sandbox.environments import EnvironmentFailed, EnvironmentProcesses
from trinity_workers.tasks import Question

pytestmark = pytest.mark.processes

TOOLS = """
import asyncio, os, subprocess, sys, time
from pathlib import Path


class Tools:
    async def reply(self, question, messages):
        text = messages[-1]["content"]
        await asyncio.sleep(0)
        if text == "hang":
            Path(question.data["pid"]).write_text(f"{os.getpid()}")
            time.sleep(1000)
        if text == "die":
            os._exit(3)
        if text == "kill":
            os.kill(os.getpid(), 9)
        if text == "raise":
            raise ValueError("no such tool")
        if text == "object":
            return object()
        if text == "number":
            return 7
        if text == "no role":
            return {"content": "x"}
        if text == "flood":
            for stream in (sys.stdout, sys.stdout, sys.__stdout__):
                stream.write("x" * 300_000)
                stream.flush()
            os.write(1, b"y" * 300_000)
            return "flooded"
        if text == "read":
            return sys.stdin.read() or "nothing to read"
        if text == "user":
            return {"role": "user", "content": "go on"}
        if text == "both":
            return [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
        if text == "end":
            return None
        return f"{question.answer} {len(messages)} {os.getpid()}"


def plain(question, messages):
    return messages[-1]["content"].upper()


def wrong(question):
    return ""


class Endless:
    def __init__(self):
        os._exit(5)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path


@pytest.fixture
async def tools(folder):
    async with EnvironmentProcesses(
        "./tools.py:Tools", deadline=PATIENCE, count=2, folder=folder
    ) as environment:
        yield environment


def messages(text):
    return [{"role": "user", "content": "question"}, {"role": "assistant", "content": text}]


def question(**data):
    return Question(prompt="p", answer=[1, {"a": 2.5}], data=data)


async def test_an_environment_gets_the_question_and_the_messages(tools):
    ((reply),) = await tools.reply(question(), messages("hello"))
    assert reply["role"] == "tool"
    assert reply["content"].startswith("[1, {'a': 2.5}] 2 ")


@pytest.mark.parametrize(
    ("text", "replies"),
    [
        ("user", [{"role": "user", "content": "go on"}]),
        ("both", [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]),
        ("end", None),
        ("flood", [{"role": "tool", "content": "flooded"}]),
        ("read", [{"role": "tool", "content": "nothing to read"}]),
    ],
)
async def test_it_replies_with_text_with_messages_or_not_at_all(tools, text, replies):
    assert await tools.reply(question(), messages(text)) == replies


async def test_a_function_is_an_environment_too(folder):
    async with EnvironmentProcesses(
        "./tools.py:plain", deadline=PATIENCE, folder=folder
    ) as environment:
        (reply,) = await environment.reply(question(), messages("shout"))
        assert reply["content"] == "SHOUT"


@pytest.mark.parametrize(
    ("text", "fault", "reason"),
    [
        ("die", "ended", "it exited with status 3"),
        ("kill", "ended", re.compile("^killed by SIGKILL")),
        ("raise", "raised", "ValueError: no such tool"),
        ("object", "raised", "it returned a value of type object"),
        ("number", "reply", "7"),
        ("no role", "reply", "{'content': 'x'}"),
    ],
)
async def test_one_that_fails_is_told_in_a_sentence_and_replaced(tools, text, fault, reason):
    with raises(EnvironmentFailed, name="./tools.py:Tools", fault=fault, reason=reason):
        await tools.reply(question(), messages(text))
    assert await tools.reply(question(), messages("hello"))


async def test_one_that_hangs_is_killed_at_the_deadline_while_other_calls_go_on(folder):
    pid = folder / "pid"
    async with (
        EnvironmentProcesses("./tools.py:Tools", deadline=3.0, count=2, folder=folder) as hanging,
        anyio.create_task_group() as tasks,
    ):
        ended = []

        async def hang():
            with raises(EnvironmentFailed, fault="slow", deadline=3.0):
                await hanging.reply(question(pid=str(pid)), messages("hang"))
            ended.append(True)

        tasks.start_soon(hang)
        await until(lambda: pid.exists() and pid.read_text())
        assert await hanging.reply(question(), messages("end")) is None
        assert not ended
        await until(lambda: ended)
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
        assert await hanging.reply(question(), messages("end")) is None


async def test_a_reply_that_lasts_is_a_reported_wait(folder):
    pid, published = folder / "pid", PublishedWaits()
    waits = WaitReporter(published, threshold=0.05)
    async with (
        EnvironmentProcesses(
            "./tools.py:Tools", deadline=PATIENCE, folder=folder, waits=waits
        ) as tools,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(tools.reply, question(pid=str(pid)), messages("hang"))
        await until(lambda: published.events)
        [wait] = published.of(WaitStarted)
        assert wait.what == "a reply of environment ./tools.py:Tools"
        await until(lambda: pid.exists() and pid.read_text())
        assert wait.waits_for == (f"process {pid.read_text()}",)
        assert wait.deadline == PATIENCE
        tasks.cancel_scope.cancel()
    assert [event.outcome for event in published.of(WaitEnded)] == ["cancelled"]


async def test_a_call_that_is_cancelled_leaves_no_reply_to_the_next_one(tools, tmp_path):
    pid = tmp_path / "pid"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tools.reply, question(pid=str(pid)), messages("hang"))
        await until(lambda: pid.exists() and pid.read_text())
        tasks.cancel_scope.cancel()
    for _ in range(3):
        assert await tools.reply(question(), messages("end")) is None


async def test_a_hanging_environment_ends_with_its_explorer(folder):
    """Closing the pipe is all that an explorer that is killed does."""
    pid = folder / "pid"
    environment = EnvironmentProcesses("./tools.py:Tools", deadline=PATIENCE, folder=folder)
    async with environment, anyio.create_task_group() as tasks:

        async def hang():
            with raises(EnvironmentFailed, fault="ended"):
                await environment.reply(question(pid=str(pid)), messages("hang"))

        child = environment._processes.idle[0]
        tasks.start_soon(hang)
        await until(lambda: pid.exists() and pid.read_text())
        await child.requests.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), signal.SIGCONT)


@pytest.mark.parametrize(
    ("name", "fault", "reason"),
    [
        ("./tool.py:Tools", "load", "there is no file .*tool.py with the environment"),
        ("./tools.py:Tool", "load", "tools.py has no 'Tool': did you mean 'Tools'"),
        ("./tools.py:wrong", "load", r"is called with \(question, messages\), and takes others"),
        ("./tools.py:Endless", "ended load", "^it exited with status 5$"),
        ("./tools.py:TOOLS", "load", "has no 'TOOLS'"),
    ],
)
async def test_one_that_cannot_be_loaded_is_told_before_the_first_episode(
    folder, name, fault, reason
):
    with raises(EnvironmentFailed, name=name, fault=fault, reason=re.compile(reason)):
        async with EnvironmentProcesses(name, deadline=PATIENCE, folder=folder):
            pass
