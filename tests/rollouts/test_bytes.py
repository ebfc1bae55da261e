"""Answers on the server stay within a bound in bytes, and a full server is named."""

import re

import anyio
import pytest

from tests.support.errors import raises
from tests.support.rollout_parts import answer, samples_of
from tests.support.waits import PATIENCE
from trinity_events.rollouts import AnswersServerFull, find_answer_bytes
from trinity_events.rollouts.settings import InvalidDispatchSetting
from trinity_schemas import ChatMessage, Experience, RunKeys, StepRef, Turn, encode, share_prompts

ANSWER = 1000
"""Bytes that a request reserves in these tests; the answers of a claim have fewer."""


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize("first", [1, 100_000])
def test_no_answer_has_more_bytes_than_are_reserved_for_it(tokens, first):
    prompt = Turn(
        role="prompt",
        tokens=range(first, first + tokens),
        messages=[ChatMessage(role="user", content="text" * tokens)],
    )
    policy = Turn(
        role="policy",
        tokens=range(first, first + tokens),
        logprobs=[-0.123456789] * tokens,
        versions=[(StepRef(2**31, 2**31), tokens)],
    )
    group = [
        Experience(
            run_id="r" * 60,
            epoch=2**31,
            ordinal=2**53,
            attempt=2**31,
            sample=sample,
            samples=8,
            explorer="e" * 60,
            turns=[prompt, policy],
            reward=0.1,
            reward_parts={"correct": 0.5, "format": 0.25},
        )
        for sample in range(8)
    ]
    size = sum(len(encode(sample)) for sample in share_prompts(group))
    reserved = find_answer_bytes(8, sampled_tokens=tokens, prompt_tokens=tokens)
    assert size <= reserved <= size + 8 * 1024 + (tokens if first == 1 else 0) * 100


async def test_prompts_ahead_of_a_step_are_held_back_by_the_bytes_of_answers(parts):
    dispatcher = await parts.dispatcher(max_bytes=3 * ANSWER, answer_bytes=ANSWER)
    assert await dispatcher.dispatch(8, parts.version) == 3
    assert await dispatcher.dispatch(8, parts.version) == 0, "three answers may still come"
    assert await answer(parts.explorer(), 3) == [0, 1, 2]
    groups = await dispatcher.take(2, deadline=PATIENCE)
    # The answers are smaller than what was reserved for them, and on the server until their step.
    answer_bytes = sum(group.size for group in groups) * 3 // 2
    assert await parts.client.memory_usage(RunKeys.of(parts.run_id).experiences) > answer_bytes > 0
    assert await dispatcher.dispatch(8, parts.version) == (3 * ANSWER - answer_bytes) // ANSWER
    await dispatcher.trained(1, groups)
    assert await dispatcher.dispatch(8, parts.version) == (answer_bytes * 2 // 3) // ANSWER + 1


async def test_a_step_gets_its_prompts_whatever_is_kept_for_a_checkpoint(parts):
    dispatcher = await parts.dispatcher(
        max_bytes=2 * ANSWER, answer_bytes=ANSWER, keep_answers="checkpoint"
    )
    await dispatcher.dispatch(2, parts.version)
    for step in range(1, 7):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer_all, parts.explorer(f"e{step}"), 2)
            groups = await dispatcher.take(2, deadline=PATIENCE)
        await dispatcher.trained(step, groups)
    size = sum(group.size for group in groups)
    assert 6 * size > 2 * ANSWER, "what is kept leaves no room"
    assert await dispatcher.dispatch(8, parts.version) == 0
    await dispatcher.checkpointed(6)
    assert await dispatcher.dispatch(8, parts.version) == 2


async def answer_all(explorer, count):
    """Answer requests until so many were answered."""
    while count:
        claims = await explorer.claim(count, seconds=PATIENCE)
        for claim in claims:
            assert await explorer.answer(claim, samples_of(claim, explorer.name))
        count -= len(claims)


async def test_a_bound_below_the_answers_of_a_step_is_refused(parts):
    with raises(InvalidDispatchSetting, name="max_bytes", fault="bytes", least=2 * ANSWER):
        await parts.dispatcher(max_bytes=2 * ANSWER - 1, answer_bytes=ANSWER)


async def test_a_full_server_is_named_with_what_to_change(parts):
    dispatcher = await parts.dispatcher()
    await dispatcher.dispatch(1, parts.version)
    explorer = parts.explorer(deadline=0.2)
    [claim] = await explorer.claim(1, seconds=PATIENCE)
    await parts.client.config_set("maxmemory", 1)
    try:
        with raises(AnswersServerFull, reason=re.compile("OOM")) as raised:
            await explorer.answer(claim, samples_of(claim))
    finally:
        await parts.client.config_set("maxmemory", 0)
    assert "rollouts.max_bytes" in str(raised.value)
    assert await explorer.answer(claim, samples_of(claim))
