"""Claims about rewards by a user's function, in real processes that hang, die and lie."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import anyio
import pytest
from msgspec import structs

from tests.support.errors import assert_attributes, raises
from tests.support.rollout_messages import experience
from tests.support.waits import until
from trinity_events.rollouts.experience_checks import find_fault
from trinity_workers.rewards import RewardFailed, RewardPool, RewardSource
from trinity_workers.rewards.errors import (
    AnswersFailed,
    RewardFunctionFailed,
    RewardProcessFailed,
)
from trinity_workers.rewards.values import rewarded
from trinity_workers.tasks import Answer, Question
from trinity_workers.tasks.errors import QuestionUnencodable

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

WHILE = 5.0
"""Seconds of a deadline that passes once, and within which a busy machine answers."""

REWARDS = """
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path

def right(question, answer):
    return float(answer.text == question.answer)

def parts(question, answer):
    return {"reward": 1, "length": len(answer.text), "finished": answer.finished}

def process(question, answer):
    return os.getpid()

def told(question, answer):
    level = question.data["level"]
    return {"reward": len(answer.messages), "tokens": answer.tokens, "level": level}

async def together(question, answer):
    together.inside = getattr(together, "inside", 0) + 1
    while together.inside < 3:
        await asyncio.sleep(0.01)
    return 1.0

async def never(question, answer):
    await asyncio.sleep(1e6)

def on_demand(question, answer):
    text = answer.text
    if text == "raise":
        return question.data["absent"]
    if text == "exit":
        sys.exit(3)
    if text == "die":
        os._exit(7)
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "hang":
        time.sleep(1e6)
    if text == "start":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
        Path(question.data["note"]).write_text(str(child.pid))
        time.sleep(1e6)
    if text == "flood":
        for _ in range(200):
            print("x" * 65536)
        os.write(1, b"not a frame" * 1000)
    if text == "input":
        return len(sys.stdin.read())
    if text == "close":
        os.closerange(3, 64)
        time.sleep(1e6)
    return {
        "nan": float("nan"), "inf": float("-inf"), "none": None, "text": "1.0",
        "list": [1.0], "unnamed": {"score": 1.0}, "bad part": {"reward": 1.0, "score": "high"},
        "huge": 10**400, "large": 1e39,
    }.get(text, 0.5)

three = 3
def one(question):
    return 1.0
"""


@pytest.fixture
async def pool(tmp_path: Path):
    """Makes a pool of one process with a function of the file."""
    (tmp_path / "mine.py").write_text(REWARDS)
    pools: list[RewardPool] = []

    def make(name: str, **settings) -> RewardPool:
        settings = {"deadline": 60.0, "processes": 1} | settings
        processes = settings.pop("processes")
        source = RewardSource(
            reward=f"./mine.py:{name}", task="sums", folder=str(tmp_path), **settings
        )
        pools.append(RewardPool(source, processes=processes))
        return pools[-1]

    yield make
    for reward_pool in pools:
        await reward_pool.aclose()


def answers(*texts: str) -> list[Answer]:
    messages = [{"role": "user", "content": "2 + 2 ="}]
    return [Answer(text=text, finished=True, messages=messages, tokens=len(text)) for text in texts]


FOUR = Question(prompt="2 + 2 =", answer="4", data={"level": 3})


async def rewards(pool: RewardPool, *texts: str, question: Question = FOUR) -> list[float]:
    return [verdict.reward for verdict in await pool.judge(question, answers(*texts))]


async def test_every_answer_gets_the_reward_of_the_function_in_order(pool):
    judging = pool("right")
    assert await rewards(judging, "4", "5", "4", "") == [1.0, 0.0, 1.0, 0.0]
    assert await rewards(judging, "5") == [0.0]
    assert await rewards(judging) == []


async def test_named_numbers_are_kept_beside_the_reward(pool):
    (verdict,) = await pool("parts").judge(FOUR, answers("four"))
    assert (verdict.reward, verdict.parts) == (1.0, {"length": 4.0, "finished": 1.0})


async def test_a_function_sees_the_questions_data_and_the_whole_episode(pool):
    (verdict,) = await pool("told").judge(FOUR, answers("4"))
    assert (verdict.reward, verdict.parts) == (1.0, {"tokens": 1.0, "level": 3.0})


async def test_a_coroutine_function_judges_a_groups_answers_side_by_side(pool):
    assert await rewards(pool("together"), "a", "b", "c") == [1.0] * 3


async def test_one_process_judges_call_after_call_and_is_not_this_one(pool):
    judging = pool("process")
    first = await rewards(judging, "a", "b")
    assert first == await rewards(judging, "c", "d")
    assert first[0] != os.getpid()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "raised KeyError: 'absent' (mine.py, line"),
        ("exit", "raised SystemExit: 3"),
        ("die", "ended its process (it exited with status 7)"),
        ("kill", "ended its process (killed by SIGKILL"),
        ("nan", "returned nan, and a reward is finite"),
        ("inf", "returned -inf, and a reward is finite"),
        ("none", "returned None, and a reward is a number or a mapping with 'reward'"),
        ("text", "returned '1.0', and a reward is a number"),
        ("list", "returned [1.0], and a reward is a number"),
        ("unnamed", "returned named numbers without 'reward': score"),
        ("bad part", "returned score = 'high', and a reward is a number"),
        ("huge", "returned 10000000000"),
        ("large", "returned 1e+39, and a reward is finite, from -1e+16 to 1e+16"),
    ],
)
async def test_a_function_that_fails_is_told_in_one_sentence_and_judges_again(pool, text, message):
    judging = pool("on_demand")
    with pytest.raises(RewardFailed) as caught:
        await judging.judge(FOUR, answers("fine", text, "fine"))
    assert f"the reward ./mine.py:on_demand {message}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert await rewards(judging, "fine", "fine") == [0.5, 0.5]


async def test_each_failed_answer_has_its_error_and_the_others_have_their_rewards(pool):
    judging = pool("on_demand")
    with pytest.raises(RewardFailed) as caught:
        await judging.judge(FOUR, answers("fine", "raise", "nan", "fine"))
    error = caught.value
    assert [*error.rewarded] == [0, 3] and [*error.faults] == [1, 2]
    raised, no_number = error.get_fault(1), error.get_fault(2)
    assert raised.error_type == "KeyError" and raised.place.startswith("mine.py, line ")
    assert raised.traceback.startswith("Traceback") and "in on_demand" in raised.traceback
    assert "child.py" not in raised.traceback
    assert (no_number.error_type, no_number.place) == ("NoReward", "")


async def test_an_answer_that_ends_the_process_has_its_error_and_so_have_those_after_it(pool):
    with pytest.raises(RewardFailed) as caught:
        await pool("on_demand").judge(FOUR, answers("fine", "die", "fine"))
    error = caught.value
    assert ([*error.rewarded], [*error.faults]) == ([0], [1, 2])
    assert error.get_fault(2).error_type == "ProcessEnded"


@pytest.mark.parametrize(
    "value",
    [
        1e39,
        -1e17,
        float("nan"),
        {"reward": 1e300},
        {"reward": 1.0, "score": 1e300},
        {"reward": 1.0, "score": float("nan")},
        {"reward": 1.0, "x" * 257: 0.0},
        {"reward": 1.0} | {f"part {at}": 0.0 for at in range(257)},
    ],
)
def test_a_value_that_the_trainer_would_refuse_is_no_reward(value):
    with pytest.raises(ValueError, match="returned"):
        rewarded(value)


@pytest.mark.parametrize(
    "value", [1e16, {"reward": -1e16, "score": 3e38}, {"reward": 0.0, "x" * 256: 1.0}]
)
def test_a_reward_at_the_limits_is_what_the_trainer_takes(value):
    judged = rewarded(value)
    sample = structs.replace(experience(), reward=judged.reward, reward_parts=judged.parts)
    assert find_fault(sample) is None


@pytest.mark.parametrize("text", ["hang", "close"])
async def test_a_function_that_hangs_is_ended_at_its_deadline(pool, text):
    judging = pool("on_demand", deadline=1.0)
    with pytest.raises(AnswersFailed) as failed:
        await judging.judge(FOUR, answers("fine", text))
    assert failed.value.faults[1].error_type in {"TimeoutError", "ProcessEnded"}
    judging = pool("on_demand")
    assert await rewards(judging, "fine") == [0.5]


async def test_the_place_of_a_function_that_hangs_is_told_and_its_stacks_are_logged(pool, caplog):
    line = 1 + REWARDS.splitlines().index("        time.sleep(1e6)")
    judging = pool("on_demand", deadline=WHILE)
    assert await rewards(judging, "fine") == [0.5]
    place = f": it was in on_demand (mine.py, line {line})"
    with raises(RewardProcessFailed, fault="late", seconds=WHILE, detail=place):
        await rewards(judging, "hang")
    [logged] = [message for message in caplog.messages if "is late; its stacks:" in message]
    assert f'mine.py", line {line} in on_demand' in logged


async def test_a_process_that_is_stopped_tells_no_place_and_is_ended(pool):
    judging = pool("process", deadline=WHILE)
    [pid] = await rewards(judging, "a")
    os.kill(int(pid), signal.SIGSTOP)
    with raises(RewardProcessFailed, fault="late", seconds=WHILE, detail=""):
        await rewards(judging, "b")
    assert await rewards(judging, "c") != [pid]


async def test_a_coroutine_that_never_returns_is_told_by_its_deadline(pool):
    with pytest.raises(AnswersFailed) as failed:
        await pool("never", deadline=1.0).judge(FOUR, answers("a", "b"))
    assert {fault.error_type for fault in failed.value.faults.values()} == {"TimeoutError"}


async def test_what_a_function_started_ends_with_its_process(pool, tmp_path):
    note = tmp_path / "note"
    question = Question(prompt="?", data={"note": str(note)})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool("on_demand", deadline=600.0).judge, question, answers("start"))
        started = int(await until(lambda: note.exists() and note.read_text()))
        tasks.cancel_scope.cancel()
    await until(lambda: not _runs(started))


async def test_what_a_function_prints_never_mixes_with_its_answers(pool, capfd):
    judging = pool("on_demand")
    assert await rewards(judging, "flood", "fine", "flood") == [0.5] * 3
    printed = capfd.readouterr()
    assert "x" * 65536 in printed.err
    assert printed.out == ""


async def test_a_function_that_reads_finds_its_input_at_an_end(pool):
    assert await rewards(pool("on_demand"), "input") == [0.0]


async def test_a_process_that_is_killed_between_calls_is_replaced(pool):
    judging = pool("process")
    (first,) = await rewards(judging, "a")
    os.kill(int(first), signal.SIGKILL)
    with raises(RewardProcessFailed, fault="ended"):
        await judging.judge(FOUR, answers("a"))
    (second,) = await rewards(judging, "a")
    assert second != first


async def test_a_hanging_answer_does_not_keep_other_groups_waiting(pool):
    judging = pool("on_demand", deadline=120.0, processes=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(judging.judge, FOUR, answers("hang"))
        with anyio.fail_after(100):
            assert await rewards(judging, "fine") == [0.5]
        tasks.cancel_scope.cancel()


async def test_a_cancelled_call_ends_its_process(pool):
    judging = pool("on_demand", deadline=600.0)
    began = time.monotonic()
    with anyio.move_on_after(3):
        await judging.judge(FOUR, answers("hang"))
    assert await rewards(judging, "fine") == [0.5]
    assert time.monotonic() - began < 300


async def test_closing_ends_the_processes(pool):
    judging = pool("process")
    (process,) = await rewards(judging, "a")
    await judging.aclose()
    with anyio.fail_after(60):
        while _runs(int(process)):
            await anyio.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rigth", "./mine.py has no 'rigth': did you mean 'right'?"),
        ("three", "reward './mine.py:three' is no function of (question, answer)"),
        ("one", "reward './mine.py:one' is called with (question, answer), and takes others"),
    ],
)
async def test_a_function_that_cannot_be_used_is_told_at_the_start(pool, name, message):
    with pytest.raises(RewardFailed) as caught:
        await pool(name).start()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_questions_without_a_reward_ask_for_one():
    source = RewardSource(reward=None, task="spell-backward", questions="q.jsonl")
    judging = RewardPool(source, processes=1)
    with pytest.raises(RewardFunctionFailed) as failed:
        await judging.start()
    assert_attributes(failed.value, function="q.jsonl")
    assert failed.value.loading.error_type == "NoReward"


async def test_a_reasoning_gym_family_judges_its_own_answers():
    pytest.importorskip("reasoning_gym")
    from trinity_workers.tasks import load_task

    name, options = "reasoning-gym:basic_arithmetic", {"source": {"size": 20}}
    question = load_task(questions=name, options=options).question(3)
    judging = RewardPool(
        RewardSource(reward=None, task="-", questions=name, options=options), processes=1
    )
    try:
        scores = await rewards(judging, str(question.answer), "no number", question=question)
    finally:
        await judging.aclose()
    assert scores[0] == 1.0 > scores[1]


async def test_a_question_that_no_process_can_be_sent_is_a_mistake_of_the_task(pool):
    with raises(QuestionUnencodable, task="sums"):
        await pool("right").judge(Question(prompt="?", answer=object()), answers("a"))


def test_numbers_of_numpy_and_torch_are_rewards():
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    for value in (numpy.float32(0.5), torch.tensor(0.5), numpy.array(0.5)):
        assert rewarded(value).reward == 0.5
    assert rewarded(True).reward == 1.0


def _runs(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
