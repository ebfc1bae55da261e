"""Rewards of services, of judges and of code, which are slow, die, lie and flood."""

from __future__ import annotations

import json
import re
import textwrap
import time

import anyio
import pytest

from tests.support.errors import assert_attributes, raises
from tests.support.reward_server import reward_server
from tests.support.rollout_parts import Parts, samples_of
from tests.support.waits import PATIENCE
from trinity_schemas import StepTrained, decode_envelope
from trinity_schemas.rollouts import LONGEST_JUDGE_REPLY
from trinity_workers.config.files import read_config
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.rewards import RewardFailed
from trinity_workers.rewards.errors import (
    AnswersFailed,
    CodeNotRunnable,
    PromptNotReadable,
    RewardCallFailed,
    RewardReplyRefused,
    RewardServiceUnusable,
)
from trinity_workers.rewards.http_calls import HttpCalls, Unusable
from trinity_workers.rewards.judge import JudgeRewards, _format_message
from trinity_workers.rewards.settings import RewardsConfig
from trinity_workers.rollouts.user_task import start_rewards
from trinity_workers.tasks import Answer, Question

pytestmark = pytest.mark.processes

SOON = 0.5
"""Seconds of a deadline that a test lets pass."""
WHILE = 5.0
"""Seconds of a deadline that passes once, and within which a busy machine answers."""


@pytest.fixture(scope="module")
def server():
    with reward_server() as (_, url):
        yield url


def question(**data):
    return Question(prompt="2 + 3?", answer="5", data=data)


def answers(*texts):
    messages = [{"role": "user", "content": "2 + 3?"}]
    return [Answer(text=text, finished=True, messages=messages, tokens=1) for text in texts]


async def judged(settings, question, given, *, deadline=PATIENCE):
    config = TrainConfig(rewards=settings).replaced("rewards", deadline=deadline)
    rewards = await start_rewards(config)
    try:
        return await rewards.judge(question, given)
    finally:
        await rewards.aclose()


def service(url, **settings):
    return RewardsConfig(service=url, **settings)


# --- services -----------------------------------------------------------------------------------


async def test_a_service_gets_question_and_answers_and_returns_rewards(server):
    verdicts = await judged(service(f"{server}/lengths"), question(), answers("a", "bcd"))
    assert [(verdict.reward, verdict.score) for verdict in verdicts] == [(1.0, 0.5), (3.0, 0.5)]


@pytest.mark.parametrize("mode", ["busy", "hangs-up"])
async def test_a_service_that_is_busy_or_hangs_up_is_asked_again(server, mode):
    verdicts = await judged(service(f"{server}/{mode}"), question(), answers("a"))
    assert [verdict.reward for verdict in verdicts] == [1.0]


async def test_attempts_are_bounded_and_the_last_fault_is_told(server):
    reason = re.compile(r"^answered 500: .+")
    with raises(RewardCallFailed, fault="attempts", reason=reason, attempts=2):
        await judged(service(f"{server}/broken", attempts=2), question(), answers("a"))


@pytest.mark.parametrize("mode", ["slow", "drips"])
async def test_a_slow_service_fails_at_the_deadline(server, mode):
    began = time.monotonic()
    with raises(RewardCallFailed, fault="late", seconds=SOON, service=re.compile(f"/{mode}$")):
        await judged(service(f"{server}/{mode}"), question(), answers("a"), deadline=SOON)
    assert time.monotonic() - began >= SOON


async def test_a_service_that_floods_is_not_read_further(server):
    with raises(RewardCallFailed, fault="large", limit=1 << 20):
        await judged(service(f"{server}/floods"), question(), answers("a"))


@pytest.mark.parametrize(
    ("mode", "attributes"),
    [
        ("too few", {"fault": "count", "rewards": 0, "answers": 2}),
        ("infinite", {"fault": "JSON"}),
        ("no json", {"fault": "JSON"}),
        ("no rewards", {"fault": "list"}),
    ],
)
async def test_a_reply_that_is_not_what_was_asked_for_is_refused(server, mode, attributes):
    settings = service(f"{server}/by-question")
    with raises(RewardReplyRefused, **attributes):
        await judged(settings, question(mode=mode), answers("a", "b"))


async def test_a_value_of_a_service_that_is_no_reward_is_its_answers_fault(server):
    settings = service(f"{server}/by-question")
    with pytest.raises(AnswersFailed) as failed:
        await judged(settings, question(mode="no numbers"), answers("a", "b"))
    assert {fault.error_type for fault in failed.value.faults.values()} == {"NoReward"}


async def test_calls_in_flight_are_bounded():
    import httpx

    with reward_server() as (_, url):
        config = TrainConfig(rewards=service(f"{url}/together", calls=2))
        rewards = await start_rewards(config)
        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(rewards.judge, question(), answers("a"))
        await rewards.aclose()
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
            assert (await client.get(url)).json()["most"] in {1, 2}


async def test_a_token_is_taken_from_the_environment(server, monkeypatch):
    settings = service(f"{server}/token", token_variable="JUDGE_TOKEN")
    with raises(RewardServiceUnusable, fault="token", setting="JUDGE_TOKEN"):
        await judged(settings, question(), answers("a"))
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    assert await judged(settings, question(), answers("a"))
    with raises(RewardServiceUnusable, fault="refused", status=401):
        await judged(service(f"{server}/refuses"), question(), answers("a"))


async def test_a_service_that_is_not_there_is_told_before_the_run_begins():
    with raises(RewardServiceUnusable, fault="absent", setting="rewards.service"):
        await judged(service("http://127.0.0.1:1/"), question(), answers("a"))


async def test_fates_tell_of_a_service_that_is_slow_lies_floods_and_dies(
    client, publisher, log, run_id
):
    """One step of real dispatch: good questions are trained, and no other holds it up."""
    modes = ["slow", "no numbers", "floods", "broken", "lengths", "lengths", "dies", "lengths"]
    parts = Parts(client, publisher, run_id)
    options = {"max_attempts": 2, "prompts_per_step": 2, "window": len(modes)}
    dispatcher = await parts.dispatcher(**options)
    await dispatcher.dispatch(len(modes), parts.version)
    explorer, failures = parts.explorer(), []

    async def explore(rewards):
        while True:
            for claim in await explorer.claim(len(modes), seconds=PATIENCE):
                tasks.start_soon(answer, rewards, claim)

    async def answer(rewards, claim):
        ordinal = claim.request.ordinal
        next_question = question(mode=modes[ordinal] if ordinal < len(modes) else "lengths")
        try:
            await rewards.judge(next_question, answers("a", "b"))
        except RewardFailed as error:
            failures.append((ordinal, error))
            await explorer.fail(claim, str(error))
        else:
            await explorer.answer(claim, samples_of(claim))

    with reward_server() as (_, url):
        config = TrainConfig(rewards=service(f"{url}/by-question", attempts=1, calls=1))
        rewards = await start_rewards(config.replaced("rewards", deadline=WHILE))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(explore, rewards)
            groups = await dispatcher.take(2, deadline=PATIENCE)
            await dispatcher.trained(1, groups)
            tasks.cancel_scope.cancel()
        await rewards.aclose()
    assert [group.experiences[0].ordinal for group in groups] == [4, 5]
    [trained] = [
        event
        for event in (decode_envelope(entry.payload).event for entry in await log.read(limit=1000))
        if isinstance(event, StepTrained)
    ]
    assert trained.dropped["attempts"][0] == (0, 3), "and perhaps those after the server's death"
    errors = dict(reversed(failures))  # the first of each
    assert_attributes(errors[0], fault="late", seconds=WHILE)
    assert errors[1].get_fault(0).error_type == "NoReward"
    assert errors[2].fault == "large"
    assert_attributes(errors[3], fault="attempts", reason=re.compile("^answered 500"))


# --- judges -------------------------------------------------------------------------------------


async def test_a_judge_grades_each_answer_by_its_reply(server):
    settings = RewardsConfig(judge=f"{server}/v1", judge_model="judge")
    verdicts = await judged(settings, question(), answers("right", "wrong {braces}"))
    # The built-in prompt has the word "right" itself: both answers get its grade.
    assert [verdict.reward for verdict in verdicts] == [0.7, 0.7]
    settings = RewardsConfig(
        judge=f"{server}/v1/", judge_model="judge", judge_prompt="{response}", best_grade=10
    )
    verdicts = await judged(settings, question(), answers("right", "wrong {braces}"))
    assert [(verdict.reward, verdict.parts["grade"]) for verdict in verdicts] == [
        (0.7, 7.0),
        (0.25, 2.5),
    ]


async def test_a_judge_without_a_grade_is_asked_again_within_its_attempts(server):
    settings = RewardsConfig(judge=f"{server}/hesitant", judge_model="judge", calls=1)
    [verdict] = await judged(settings, question(), answers("right"))
    assert verdict.reward == 0.7
    mute = RewardsConfig(judge=f"{server}/mute", judge_model="judge", attempts=2)
    with pytest.raises(AnswersFailed) as failed:
        await judged(mute, question(), answers("a"))
    assert failed.value.faults[0].error_type == "RewardCallFailed"


def completion(reply, **choice):
    return json.dumps({"choices": [{"message": {"content": reply}, **choice}]})


@pytest.mark.parametrize(
    ("reply", "grade"),
    [
        ("**Grade:** 3/10", 3.0),
        ("0/10", 0.0),
        (".5", 0.5),
        ("80%", 8.0),
        ([{"type": "text", "text": "Grade: "}, {"type": "text", "text": "8"}], 8.0),
    ],
)
async def test_the_reward_is_the_grade_over_its_scale(server, reply, grade):
    settings = RewardsConfig(judge=f"{server}/raw", judge_model="j", judge_prompt="{response}")
    [verdict] = await judged(settings, question(), answers(completion(reply)))
    assert (verdict.reward, verdict.parts) == (grade / 10, {"grade": grade})


async def test_a_judges_reply_is_kept_and_a_long_one_at_its_ends(server):
    settings = RewardsConfig(judge=f"{server}/raw", judge_model="j", judge_prompt="{response}")
    replies = ["Short. Grade: 3/10", "Because " + 3000 * "so " + "Grade: 3/10"]
    short, long = await judged(settings, question(), answers(*map(completion, replies)))
    assert short.judge_reply == replies[0]
    assert long.judge_reply.startswith("Because") and long.judge_reply.endswith("Grade: 3/10")
    assert len(long.judge_reply) <= LONGEST_JUDGE_REPLY


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (completion("Grade: 1", finish_reason="length"), "unclear"),
        (completion([{"type": "image_url", "image_url": {}}]), "unclear"),
        (completion({"grade": 8}), "unclear"),
        (completion(None), "unclear"),
        ('{"choices": []}', "unclear"),
        ('{"choices": [{"message": {"content": "\xf6"}}]}', "format"),
        ("[" * 100_000, "format"),
    ],
)
async def test_a_reply_that_cannot_be_graded_is_unusable(server, body, fault):
    settings = RewardsConfig(
        judge=f"{server}/raw", judge_model="j", judge_prompt="{response}", attempts=1
    )
    judge = JudgeRewards(f"{server}/raw", settings, HttpCalls("j", deadline=1, attempts=1, calls=1))
    with raises(Unusable, fault=fault):
        judge._graded(body.encode("latin-1"))
    await judge.aclose()
    with pytest.raises(AnswersFailed) as failed:
        await judged(settings, question(), answers(body))
    assert failed.value.faults[0].error_type == "RewardCallFailed"


CALL = [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "right"}}}]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "ri"}, "ght"]}],
        [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": CALL}],
        [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "right"}],
    ],
)
async def test_a_judge_reads_messages_of_several_parts_and_of_tool_calls(server, messages):
    settings = RewardsConfig(
        judge=f"{server}/v1", judge_model="j", judge_prompt="{prompt} {response}"
    )
    [verdict] = await judged(settings, Question(prompt=messages), answers("a"))
    assert verdict.reward == 0.7, "the judge found the word in the prompt"


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"content": "?"}, "role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "assistant", "tool_calls": [object()]}, "calls"),
        ({"role": "user", "content": "\ud83d"}, None),
    ],
)
async def test_a_message_that_a_judge_cannot_read_fails_the_reward(server, message, fault):
    if fault is not None:
        with raises(PromptNotReadable, fault=fault):
            _format_message(message)
    settings = RewardsConfig(judge=f"{server}/v1", judge_model="j")
    with pytest.raises(AnswersFailed) as failed:
        await judged(settings, Question(prompt=[message]), answers("a"))
    error_type = "RewardCallFailed" if fault is None else "PromptNotReadable"
    assert failed.value.faults[0].error_type == error_type


# --- code ---------------------------------------------------------------------------------------

TESTS = "assert add(2, 3) == 5"
GOOD = "def add(a, b):\n    return a + b"
CODE = RewardsConfig(code_tests="tests", code_memory_mb=256, code_file_mb=1)


async def test_code_is_right_if_it_and_its_tests_run_to_their_end():
    texts = [
        GOOD,
        f"Here it is:\n```python\nadd = None\n```\nor\n```python\n{GOOD}\n```\n",
        "def add(a, b):\n    return a - b",
        "not python",
    ]
    verdicts = await judged(CODE, question(tests=TESTS), answers(*texts))
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "code",
    {
        "leaves before the tests": "import sys; sys.exit(0)",
        "ends its process": "import os; os._exit(0)",
        "takes all memory": "x = bytearray(1 << 40)",
        "writes a large file": "open('x', 'wb').write(bytes(1 << 22))",
        "opens many files": "files = [open('/dev/null') for _ in range(100)]",
        "dies": "import os; os.kill(os.getpid(), 9)",
        "says the wrong token": "import os\nfor n in range(3, 9):\n  os.write(n, b'x' * 100)",
        "reads what is not there": "import os; os.environ['HOME_OF_EXPLORER']",
    }.values(),
)
async def test_code_that_breaks_its_limits_is_a_wrong_answer(code):
    verdicts = await judged(CODE, question(tests=TESTS), answers(f"{code}\n{GOOD}"))
    assert [verdict.reward for verdict in verdicts] == [0.0]


async def test_code_that_hangs_or_floods_is_ended_with_all_that_it_started(tmp_path):
    note = tmp_path / "pid"
    hangs = (
        "import subprocess, time, pathlib\n"
        "child = subprocess.Popen(['sleep', '3600'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
        "print('x' * 10_000_000)\n"
        "time.sleep(3600)"
    )
    verdicts = await judged(CODE, question(tests=TESTS), answers(hangs), deadline=WHILE)
    assert [verdict.reward for verdict in verdicts] == [0.0]
    with anyio.fail_after(PATIENCE):
        while _runs(int(note.read_text())):
            await anyio.sleep(0.01)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def test_the_same_program_earns_the_same_reward_in_every_fence():
    indented = textwrap.indent(GOOD, "   ")
    texts = [
        f"Here:\n```python3\n{GOOD}\n```",
        f"```Python\n{GOOD}\n```\n",
        f"Here:\n```python\n{GOOD}\n```".replace("\n", "\r\n"),
        f"1. Code:\n   ```py\n{indented}\n   ```",
        f"~~~python\n{GOOD}\n~~~",
        f"````markdown\n```python\n{GOOD}\n```\n````",
        f"Code: ```python\n{GOOD}```",
    ]
    verdicts = await judged(CODE, question(tests=TESTS), answers(*texts))
    assert [verdict.reward for verdict in verdicts] == [1.0] * len(texts)


async def test_a_block_that_uses_the_program_does_not_take_its_place():
    texts = [
        f"```python\n{GOOD}\n```\nIt is used so:\n```python\nprint(add(1, 2))\n```",
        f"```python\n{GOOD}\n```\nIt prints:\n```\n3\n```",
        f"```python\n{GOOD}\n```\n```python\n>>> add(1, 2)\n3\n```",
        "```python\nimport operator\n```\n```python\ndef add(a, b):\n"
        "    return operator.add(a, b)\n```",
        f"First `a`:\n```python\nif a:\n    return b\n```\nThen:\n```python\n{GOOD}\n```",
        f"```python\nraise ValueError\n```\n```python\n{GOOD}\n```",
    ]
    verdicts = await judged(CODE, question(tests=TESTS), answers(*texts))
    assert [verdict.reward for verdict in verdicts] == [1.0] * len(texts)


async def test_the_last_program_is_judged_and_no_draft_before_it():
    wrong = "def add(a, b):\n    return a - b"
    text = f"```python\n{GOOD}\n```\nNo:\n```python\n{wrong}\n```"
    verdicts = await judged(CODE, question(tests=TESTS), answers(text))
    assert [verdict.reward for verdict in verdicts] == [0.0]


async def test_a_question_without_tests_is_told():
    proposal = re.compile(r"'a\.tests'")
    with raises(CodeNotRunnable, fault="tests", field="tests", proposal=proposal):
        await judged(CODE, question(a={"tests": TESTS}), answers(GOOD))


async def test_tests_may_be_at_a_path_of_the_record():
    settings = RewardsConfig(code_tests="extra_info.tests")
    verdicts = await judged(settings, question(extra_info={"tests": TESTS}), answers(GOOD))
    assert [verdict.reward for verdict in verdicts] == [1.0]


# --- mistakes -----------------------------------------------------------------------------------

JUDGE = {"judge": "http://h/v1", "judge_model": "m"}


@pytest.mark.parametrize(
    ("rewards", "task", "message"),
    [
        ({"service": "http://h/", "code_tests": "t"}, {}, "each judge the answers: keep one"),
        (
            {"error_score": -1.0},
            {},
            "rewards.error_score is -1, and rewards.on_error fail gives no score: set",
        ),
        (
            {"service": "http://h/", "function": "a:b"},
            {},
            "rewards.function and rewards.service each judge",
        ),
        ({"service": "h:80"}, {}, "'h:80', which is no URL of HTTP"),
        ({"judge": "http://h/v1"}, {}, "rewards.judge needs rewards.judge_model"),
        ({**JUDGE, "judge_prompt": "{answer}"}, {}, "unknown place {answer}"),
        ({**JUDGE, "judge_prompt": "{"}, {}, "cannot be read"),
        ({**JUDGE, "judge_prompt": "grade"}, {}, "has no place for the response"),
        ({**JUDGE, "judge_prompt": "{response:d}"}, {}, "cannot be filled in"),
    ],
)
def test_mistakes_in_the_settings_are_one_sentence(rewards, task, message, tmp_path):
    import yaml

    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"rewards": rewards, "task": task}))
    [problem] = read_config(path).problems
    assert message in problem.sentence
