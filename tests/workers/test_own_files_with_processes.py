"""Claims about users' own files that start processes, in each place where such a file is loaded.

The processes find the functions that they are sent by the name of the file's module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from joblib.externals.loky import get_reusable_executor

from tests.support.waits import PATIENCE
from trinity_workers.rewards import RewardPool, RewardSource
from trinity_workers.sandbox.environments import EnvironmentProcesses
from trinity_workers.tasks import Answer, Question
from trinity_workers.tasks.loading import load_task

pytestmark = pytest.mark.processes

IDIOMS = {
    "a pool of forks": """
import multiprocessing
def doubled(numbers):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(double, numbers)
""",
    "an executor of spawned processes": """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
def doubled(numbers):
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as executor:
        return list(executor.map(double, numbers))
""",
    "joblib": """
from joblib import Parallel, delayed
def doubled(numbers):
    return Parallel(n_jobs=2)(delayed(double)(number) for number in numbers)
""",
    "threads of joblib": """
from joblib import Parallel, delayed
def doubled(numbers):
    parallel = Parallel(n_jobs=2, prefer="threads")
    return parallel(delayed(double)(number) for number in numbers)
""",
}
OWN = """
def double(number):
    return 2 * number

def reward(question, answer):
    return sum(doubled([1, 2]))

def reply(question, messages):
    return str(doubled([1, 2]))

def loss(tokens, config):
    return doubled([tokens, config])

class Task:
    name = "own"
    fingerprint = "own"

    def __init__(self, seed):
        self._numbers = doubled([seed, 2])

    def question(self, ordinal):
        raise NotImplementedError

    def held_out(self, count):
        return []

    def reward(self, question, answer):
        return float(sum(self._numbers))
"""


@pytest.fixture(params=IDIOMS)
def own(request, tmp_path) -> Iterator[Path]:
    """A user's file with one way to start processes; its name is that of no other module."""
    path = tmp_path / f"own_{abs(hash(request.node.name))}.py"
    path.write_text(IDIOMS[request.param] + OWN)
    yield path
    if request.param == "joblib":
        # It keeps its processes for the next call; they know the folders of their start alone.
        get_reusable_executor().shutdown()


async def test_a_reward_may(own):
    source = RewardSource(reward=f"{own}:reward", task="own", deadline=10 * PATIENCE)
    pool = RewardPool(source, processes=1)
    try:
        answer = Answer(text="a", finished=True, messages=[], tokens=1)
        (verdict,) = await pool.judge(Question(prompt="p"), [answer])
        assert verdict.reward == 6.0
    finally:
        await pool.aclose()


async def test_an_environment_may(own):
    async with EnvironmentProcesses(
        f"./{own.name}:reply", deadline=10 * PATIENCE, count=1, folder=own.parent
    ) as environment:
        (reply,) = await environment.reply(Question(prompt="p"), [])
        assert reply["content"] == "[2, 4]"


def test_a_loss_may(own):
    registry = pytest.importorskip("trinity_workers.algorithms.registry")
    assert registry.find_policy_loss(f"{own}:loss")(1, 2) == [2, 4]


def test_a_task_may(own):
    task = load_task(f"{own}:Task", seed=1)
    assert task.reward(Question(prompt="p"), None) == 6.0
