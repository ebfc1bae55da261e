"""Claims about reward functions with event loops, processes and cancellations of their own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.waits import PATIENCE
from trinity_workers.rewards import RewardPool, RewardSource
from trinity_workers.rewards.errors import AnswersFailed
from trinity_workers.tasks import Answer, Question

pytestmark = pytest.mark.processes

REWARDS = """
import asyncio
import multiprocessing
import sqlite3

connection = sqlite3.connect(":memory:")  # which refuses other threads
gate = asyncio.Semaphore(2)

async def ask(text):
    await asyncio.sleep(0.001)
    return 1.0

def runs_a_loop(question, answer):
    return asyncio.run(ask(answer.text))

def closes_a_loop(question, answer):
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(ask(answer.text))
    finally:
        loop.close()

async def has_a_gate(question, answer):
    async with gate:
        return await ask(answer.text)

async def has_a_connection(question, answer):
    await ask(answer.text)
    return float(connection.execute("select 1").fetchone()[0])

def returns_a_coroutine(question, answer):
    return has_a_gate(question, answer)

def double(number):
    return 2 * number

def has_processes(question, answer):
    with multiprocessing.get_context(answer.text).Pool(2) as processes:
        return sum(processes.map(double, [1, 2]))

def is_cancelled(question, answer):
    raise asyncio.CancelledError

def is_interrupted(question, answer):
    raise KeyboardInterrupt

async def awaits_what_is_cancelled(question, answer):
    task = asyncio.create_task(asyncio.sleep(3600))
    asyncio.get_running_loop().call_soon(task.cancel)
    await task

async def cancels_itself(question, answer):
    asyncio.current_task().cancel()
    await asyncio.sleep(3600)

async def exits(question, answer):
    raise SystemExit(3)

class Unprintable(Exception):
    def __str__(self):
        raise ValueError

def has_no_message(question, answer):
    raise Unprintable

def has_a_surrogate(question, answer):
    raise ValueError("\\ud800 is no text")
"""


@pytest.fixture
async def judge(tmp_path: Path):
    """Judges answers to one question after the other by a function of a file."""
    pools: list[RewardPool] = []

    def pool(name: str, file: str) -> RewardPool:
        (tmp_path / file).write_text(REWARDS)
        source = RewardSource(
            reward=f"./{file}:{name}", task="own", folder=str(tmp_path), deadline=10 * PATIENCE
        )
        pools.append(RewardPool(source, processes=1))
        return pools[-1]

    async def judge(name: str, *texts: str, questions: int = 1, file: str = "mine.py"):
        judging = pool(name, file)
        answers = [Answer(text=text, finished=True, messages=[], tokens=1) for text in texts]
        return [
            [
                verdict.reward
                for verdict in await judging.judge(Question(prompt=f"{number}"), answers)
            ]
            for number in range(questions)
        ]

    yield judge
    for judging in pools:
        await judging.aclose()


@pytest.mark.parametrize(
    "name",
    ["runs_a_loop", "closes_a_loop", "has_a_gate", "has_a_connection", "returns_a_coroutine"],
)
async def test_a_function_may_run_loops_and_keep_what_belongs_to_a_loop_or_a_thread(judge, name):
    assert await judge(name, "a", "b", "c", "d", questions=3) == [[1.0] * 4] * 3


@pytest.mark.parametrize(
    ("file", "method"), [("mine.py", "fork"), ("mine.py", "spawn"), ("json.py", "fork")]
)
async def test_a_function_may_have_processes_of_its_own(judge, file, method):
    assert await judge("has_processes", method, file=file) == [[6.0]]


@pytest.mark.parametrize(
    ("name", "error_type"),
    [
        ("is_cancelled", "CancelledError"),
        ("awaits_what_is_cancelled", "CancelledError"),
        ("cancels_itself", "CancelledError"),
        ("is_interrupted", "KeyboardInterrupt"),
        ("exits", "SystemExit"),
        ("has_no_message", "Unprintable"),
        ("has_a_surrogate", "ValueError"),
    ],
)
async def test_a_function_that_is_cancelled_fails_at_once(judge, name, error_type):
    began = time.monotonic()
    with pytest.raises(AnswersFailed) as failed:
        await judge(name, "a", "b")
    assert failed.value.faults[0].error_type == error_type
    assert time.monotonic() - began < 5 * PATIENCE, "and not at its deadline"
