"""Episodes: turns of policy and environment, their tokens, and the experiences they become."""

import copy
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from tests.support.errors import assert_attributes, raises
from trinity_workers.learning.pretrained import ReplyRefused

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.pipeline import PATIENCE  # noqa: E402
from trinity_schemas import (  # noqa: E402
    ChatMessage,
    Experience,
    PayloadAddress,
    RolloutRequest,
    Sampling,
    StepRef,
    Turn,
    decode_reward_error,
    decode_turns,
    encode,
    encode_turns,
    refer,
)
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.prepare import prepare  # noqa: E402
from trinity_workers.algorithms.settings import AlgorithmConfig  # noqa: E402
from trinity_workers.algorithms.update import policy_update  # noqa: E402
from trinity_workers.learning.logprobs import response_logprobs  # noqa: E402
from trinity_workers.learning.policy import (  # noqa: E402
    encode_prompt,
    load_policy,
    load_tokenizer,
)
from trinity_workers.rewards import Rewarded, RewardFailed, RewardFault  # noqa: E402
from trinity_workers.rewards.error_reports import AnswersNotJudged, ErrorReports  # noqa: E402
from trinity_workers.rewards.errors import AnswersFailed  # noqa: E402
from trinity_workers.rollout_engines import (  # noqa: E402
    EngineOptions,
    Generation,
    load_engine,
)
from trinity_workers.rollouts.chat_messages import convert_messages  # noqa: E402
from trinity_workers.rollouts.episodes import (  # noqa: E402
    Episodes,
    OtherVersion,
    PromptTooLong,
    continuation,
)
from trinity_workers.sandbox.environments import EnvironmentFailed, EnvironmentProcesses  # noqa: E402
from trinity_workers.tasks import Question, QuestionSet  # noqa: E402

VERSION = StepRef(1, 4)
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task"


@dataclass
class Verdict:
    reward: float
    parts: dict = field(default_factory=dict)
    judge_reply: str = ""


class ByLength:
    """Judges by the number of tokens; fails where it is told to."""

    def __init__(self, fails=()):
        self.fails = fails
        self.judged = []

    async def judge(self, question, answers):
        self.judged += answers
        if question.data.get("name") in self.fails:
            raise EnvironmentFailed("mine", "raised", "no")
        return [
            Verdict(float(answer.tokens), {"length": float(len(answer.text))}) for answer in answers
        ]


class Scripted:
    """An engine that replies with scripted turns and records the requests; not a policy."""

    context_length = 256
    serves = VERSION

    def __init__(self, tokenizer, *turns, finished=True):
        self.requests = []
        self._tokenizer = tokenizer
        self._turns = turns
        self._finished = finished

    async def generate(self, requests):
        self.requests += requests
        generations = []
        for request in requests:
            text = self._turns[min(request.turn, len(self._turns) - 1)]
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
            tokens += [self._tokenizer.eos_token_id] * self._finished
            generations.append(
                Generation(
                    tokens=tokens,
                    logprobs=[-0.5] * len(tokens),
                    versions=[(self.serves, len(tokens))],
                    finished=self._finished,
                )
            )
        return generations


class Replies:
    """An environment in this process, with one reply after another."""

    def __init__(self, *replies):
        self.replies = replies
        self.seen = []

    async def reply(self, question, messages):
        self.seen.append([*messages])
        at = sum(message["role"] == "assistant" for message in messages) - 1
        reply = self.replies[at] if at < len(self.replies) else None
        if isinstance(reply, Exception):
            raise reply
        return None if reply is None else [{"role": "tool", "content": reply}]


def chat(text, **data):
    messages = [{"role": "system", "content": "use tools"}, {"role": "user", "content": text}]
    return Question(prompt=messages, answer="a", data=data)


def task_of(*questions):
    return QuestionSet("mine", questions, shuffle=False, evaluation=[])


@pytest.fixture
def tokenizer(own_model_folder):
    return load_tokenizer(own_model_folder())


def request_for(task, ordinal=0, samples=2, **changes):
    request = RolloutRequest(
        run_id="run",
        epoch=1,
        ordinal=ordinal,
        attempt=2,
        samples=samples,
        sampling=Sampling(max_new_tokens=16, seed=3),
        oldest=VERSION,
        fingerprint=task.fingerprint,
        deadline=60.0,
    )
    return msgspec.structs.replace(request, **changes)


def episodes_of(engine, tokenizer, task, **options):
    options = {"judge": ByLength(), "explorer": "e-1", **options}
    return Episodes(engine=engine, tokenizer=tokenizer, task=task, **options)


async def test_a_real_policy_answers_a_request_with_one_experience_a_sample(
    own_model_folder, tokenizer
):
    engine = load_engine(
        "huggingface", EngineOptions(model_folder=own_model_folder(), serves=VERSION)
    )
    task = task_of(chat("1 + 2"), Question(prompt="1 + 2 ="))
    episodes = episodes_of(engine, tokenizer, task)
    for ordinal, question in enumerate(task._all):
        experiences = await episodes.answer(request_for(task, ordinal, samples=3))
        assert [experience.sample for experience in experiences] == [0, 1, 2]
        for experience in experiences:
            assert isinstance(experience, Experience)
            assert (
                experience.ordinal,
                experience.attempt,
                experience.samples,
                experience.explorer,
            ) == (ordinal, 2, 3, "e-1")
            prompt, policy = experience.turns
            assert prompt.tokens == encode_prompt(tokenizer, question.prompt)
            assert policy.versions == [(VERSION, len(policy.tokens))]
            assert experience.reward == len(policy.tokens)
            assert set(experience.reward_parts) == {"length"}
            assert experience.finished == (policy.tokens[-1] == tokenizer.eos_token_id)
        assert len({tuple(experience.turns[1].tokens) for experience in experiences}) == 3


async def test_tokens_of_earlier_turns_are_kept_and_only_new_messages_are_encoded(tokenizer):
    task = task_of(chat("what is 2 + 3?"))
    engine = Scripted(tokenizer, "call 2 + 3", "five")
    environment = Replies("5")
    episodes = episodes_of(engine, tokenizer, task, environment=environment, max_turns=4)
    (experience,) = await episodes.answer(request_for(task, samples=1))
    roles = [turn.role for turn in experience.turns]
    assert roles == ["prompt", "policy", "environment", "policy"]
    assert [request.turn for request in engine.requests] == [0, 1]
    before_last = [token for turn in experience.turns[:-1] for token in turn.tokens]
    assert engine.requests[1].tokens == before_last
    # The whole is the very text of the template, with each of its tokens in its place.
    text = tokenizer.apply_chat_template(
        [
            *task.question(0).prompt,
            {"role": "assistant", "content": "call 2 + 3"},
            {"role": "tool", "content": "5"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.decode(before_last) == text
    assert environment.seen[0][-1] == {"role": "assistant", "content": "call 2 + 3"}
    assert not experience.turns[2].logprobs and not experience.turns[2].versions


async def test_messages_of_prompts_and_tools_are_sent_for_the_record_and_bounded(tokenizer):
    task = task_of(chat("what is 2 + 3?"), Question(prompt="2 + 3 ="))
    parts = [{"type": "text", "text": "5"}, {"type": "image", "image": "a"}]
    reply = {"role": "tool", "content": parts, "name": "calc", "arguments": "2 + 3"}

    class Tool:
        async def reply(self, question, messages):
            return None if messages[-1]["content"] == "five" else [reply]

    def play(ordinal, **options):
        engine = Scripted(tokenizer, "calc(2 + 3)", "five")
        episodes = episodes_of(engine, tokenizer, task, environment=Tool(), max_turns=2, **options)
        return episodes.answer(request_for(task, ordinal, samples=1))

    address = PayloadAddress(transport="redis", name="0" * 32, size=1, digest="xxh3:" + "0" * 32)
    (experience,) = await play(0, keeps_messages=True)
    prompt, policy, tool, last = experience.turns
    assert [(message.role, message.content) for message in prompt.messages] == [
        ("system", "use tools"),
        ("user", "what is 2 + 3?"),
    ]
    expected = ChatMessage(role="tool", content="5[image]", name="calc", arguments="2 + 3")
    assert tool.messages == [expected]
    assert policy.messages == last.messages == []
    assert decode_turns(encode_turns([experience]), refer([experience], address)) == [experience]
    (unrecorded,) = await play(0)
    assert not any(turn.messages for turn in unrecorded.turns)
    (text,) = await play(1, keeps_messages=True)
    assert text.turns[0].messages == []
    long = convert_messages([{"role": "user", "content": "a" * 2**18}, reply])
    assert sum(len(message.content) + len(message.arguments) for message in long) == 2**18


@pytest.mark.parametrize(("include_stop", "expected"), [(False, "call 2"), (True, "call 2</call>")])
async def test_a_stop_string_is_in_the_tokens_and_in_the_text_if_asked(
    tokenizer, include_stop, expected
):
    task = task_of(chat("what is 2?"))

    class Stopping(Scripted):
        async def generate(self, requests):
            generations = await super().generate(requests)
            if requests[0].turn:
                return generations
            tokens = tokenizer.encode("call 2</call>\n", add_special_tokens=False)
            changed = {"tokens": tokens, "stop": "</call>", "logprobs": [-1.0] * len(tokens)}
            changed["versions"] = [(VERSION, len(tokens))]
            return [msgspec.structs.replace(generation, **changed) for generation in generations]

    engine, environment = Stopping(tokenizer, "", "two"), Replies("2")
    options = {"environment": environment, "max_turns": 2, "include_stop": include_stop}
    (experience,) = await episodes_of(engine, tokenizer, task, **options).answer(
        request_for(task, samples=1)
    )
    assert environment.seen[0][-1]["content"] == expected
    assert experience.finished
    assert tokenizer.decode(experience.turns[1].tokens) == "call 2</call>\n"
    # The policy did not sample the end of its turn: the template writes it.
    assert tokenizer.decode(experience.turns[2].tokens).startswith("<|end|><|start|>tool")


async def test_a_prompt_above_the_limit_is_refused_and_template_options_reach_every_rendering(
    tokenizer,
):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template + "{% if thinking %}<think>{% endif %}"
    task = task_of(chat("what is 2?"))
    plain = encode_prompt(tokenizer, task.question(0).prompt)
    thinking = encode_prompt(tokenizer, task.question(0).prompt, template_kwargs={"thinking": True})
    assert len(thinking) > len(plain)
    options = {"environment": Replies("2"), "max_turns": 2}
    options |= {"template_kwargs": {"thinking": True}, "max_prompt_tokens": len(thinking)}
    episodes = episodes_of(Scripted(tokenizer, "call", "two"), tokenizer, task, **options)
    (experience,) = await episodes.answer(request_for(task, samples=1))
    assert experience.turns[0].tokens == thinking
    assert tokenizer.decode(experience.turns[2].tokens).endswith("assistant\n<think>")
    shorter = {**options, "max_prompt_tokens": len(thinking) - 1}
    (answer,) = await episodes_of(
        Scripted(tokenizer, "call"), tokenizer, task, **shorter
    ).answer_all([request_for(task, samples=1)])
    assert isinstance(answer, PromptTooLong)
    assert_attributes(answer, tokens=len(thinking), setting="rollouts.max_prompt_tokens")


async def test_tokens_that_no_encoding_of_their_text_gives_survive_a_turn(tokenizer):
    """A policy may sample letters by single bytes, where the tokenizer would merge them."""
    merged = tokenizer.encode("user", add_special_tokens=False)
    single = [tokenizer.convert_tokens_to_ids(letter) for letter in "user"]
    assert merged != single and tokenizer.decode(single) == "user"
    task = task_of(chat("who?"))
    engine = Scripted(tokenizer, "user", "x")
    encode = engine._tokenizer.encode
    assert encode("user", add_special_tokens=False) == merged

    class ByLetter(Scripted):
        async def generate(self, requests):
            generations = await super().generate(requests)
            if requests[0].turn:
                return generations
            tokens = [*single, tokenizer.eos_token_id]
            changed = {"tokens": tokens, "logprobs": [-1.0] * 5, "versions": [(VERSION, 5)]}
            return [msgspec.structs.replace(generation, **changed) for generation in generations]

    engine = ByLetter(tokenizer, "user", "x")
    episodes = episodes_of(engine, tokenizer, task, environment=Replies("r"), max_turns=2)
    (experience,) = await episodes.answer(request_for(task, samples=1))
    assert experience.turns[1].tokens[:-1] == single
    sent = engine.requests[1].tokens
    at = len(experience.turns[0].tokens)
    assert sent[at : at + 4] == single


async def test_a_template_that_treats_earlier_turns_otherwise_changes_no_token(tokenizer):
    """Qwen3's template cuts the thoughts out of all turns but the last, and trims them."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and not loop.last %}"
        "{{ m['content'].split('</think>')[-1].strip() }}"
        "{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
    )
    task = task_of(chat("think"))
    engine = Scripted(tokenizer, "hm </think> call 1", "so </think> done")
    episodes = episodes_of(engine, tokenizer, task, environment=Replies("1"), max_turns=3)
    (experience,) = await episodes.answer(request_for(task, samples=1))
    text = tokenizer.decode([token for turn in experience.turns for token in turn.tokens])
    assert text == (
        "<|start|>system\nuse tools<|end|>\n<|start|>user\nthink<|end|>\n"
        "<|start|>assistant\n<think>\nhm </think> call 1<|end|>\n"
        "<|start|>tool\n1<|end|>\n<|start|>assistant\n<think>\nso </think> done<|end|>"
    )


def test_an_end_that_the_template_does_not_write_is_followed_by_the_templates_own(tokenizer):
    other = tokenizer.convert_tokens_to_ids("<|text|>")
    messages = [*chat("q").prompt, {"role": "assistant", "content": "a"}]
    replies = [{"role": "tool", "content": "r"}]
    ended = continuation(tokenizer, messages, replies, tokenizer.eos_token_id)
    assert ended == "<|start|>tool\nr<|end|><|start|>assistant\n"
    assert continuation(tokenizer, messages, replies, other) == f"<|end|>{ended}"


async def test_prompts_of_text_go_on_with_the_reply_as_it_is(tokenizer):
    task = task_of(Question(prompt="2 + 3 ="))
    engine = Scripted(tokenizer, "call", "5")
    episodes = episodes_of(engine, tokenizer, task, environment=Replies("\n5\n"), max_turns=2)
    (experience,) = await episodes.answer(request_for(task, samples=1))
    assert tokenizer.decode(experience.turns[2].tokens) == "\n5\n"


@pytest.mark.parametrize(
    ("turns", "options", "roles"),
    [
        (2, {}, ["prompt", "policy", "environment", "policy"]),
        (5, {}, ["prompt", *["policy", "environment"] * 2, "policy"]),
        (5, {"finished": False}, ["prompt", "policy"]),
    ],
)
async def test_an_episode_ends_at_its_limits_or_with_the_environment(
    tokenizer, turns, options, roles
):
    task = task_of(chat("q"))
    engine = Scripted(tokenizer, "a", **options)
    environment = Replies("r", "s")
    episodes = episodes_of(engine, tokenizer, task, environment=environment, max_turns=turns)
    (experience,) = await episodes.answer(request_for(task, samples=1))
    assert [turn.role for turn in experience.turns] == roles
    assert experience.finished == options.get("finished", True)


async def test_an_episode_ends_where_the_models_context_does(tokenizer):
    task = task_of(chat("q"))
    engine = Scripted(tokenizer, "a")
    episodes = episodes_of(engine, tokenizer, task, environment=Replies("r" * 400), max_turns=9)
    (experience,) = await episodes.answer(request_for(task, samples=1))
    assert [turn.role for turn in experience.turns] == ["prompt", "policy"]
    assert not experience.finished


@pytest.mark.processes
async def test_the_examples_tool_answers_from_its_process(tokenizer):
    task = task_of(chat("what is 6 * 7?"))
    engine = Scripted(tokenizer, "calc(6 * 7) ", "calc(1 / 0)", "calc(open)", "42")
    judge = ByLength()
    async with EnvironmentProcesses(
        "./calculator.py:Calculator", deadline=PATIENCE, folder=EXAMPLE
    ) as environment:
        episodes = episodes_of(
            engine, tokenizer, task, judge=judge, environment=environment, max_turns=9
        )
        (experience,) = await episodes.answer(request_for(task, samples=1))
    tool_replies = [
        message["content"] for message in judge.judged[0].messages if message["role"] == "tool"
    ]
    errors = ("division by zero", "only + - * / and numbers are known")
    assert tool_replies == ["42", *(f"error: {error}" for error in errors)]
    assert judge.judged[0].text == "42"
    assert [turn.role for turn in experience.turns][-3:] == ["policy", "environment", "policy"]


async def test_a_reward_without_the_part_that_the_trainer_reads_is_a_failed_reward(tokenizer):
    task = task_of(chat("q"))
    for part, failed in (("length", False), ("score", True)):
        episodes = episodes_of(Scripted(tokenizer, "a"), tokenizer, task, needed_part=part)
        [answer] = await episodes.answer_all([request_for(task)])
        assert isinstance(answer, RewardFailed) is failed


class FailsSecond(ByLength):
    """Judges the first answer of a group, and fails for the second."""

    async def judge(self, question, answers):
        fault = RewardFault(
            sentence="the reward mine raised KeyError: 'a' (reward.py, line 2)",
            error_type="KeyError",
            place="reward.py, line 2",
            traceback="Traceback",
        )
        rewarded = {0: Rewarded(reward=1.0, parts={"p": 1.0})}
        raise AnswersFailed(faults={1: fault}, rewarded=rewarded)


@pytest.mark.parametrize("on_error", ["fail", "drop_group"])
async def test_a_failed_reward_fails_its_request_with_the_error_and_the_answer(tokenizer, on_error):
    reports = ErrorReports((published := []).append)
    task = task_of(chat("what is 2 + 2?"))
    episodes = episodes_of(
        Scripted(tokenizer, "four" + "x" * 9000),
        tokenizer,
        task,
        judge=FailsSecond(),
        on_error=on_error,
        report=reports.add,
    )
    for _ in range(2):
        [failed] = await episodes.answer_all([request_for(task)])
        assert isinstance(failed, AnswersNotJudged)
    [report] = published
    assert report == failed.report, "the first error of a cause is reported, and no other"
    assert (report.explorer, report.ordinal, report.attempt, report.sample) == ("e-1", 0, 2, 1)
    assert (report.error_type, report.place) == ("KeyError", "reward.py, line 2")
    assert "user: what is 2 + 2?" in report.prompt and report.response.startswith("four")
    assert decode_reward_error(encode(report)) == report, "its excerpts are within the contract"


async def test_a_failed_reward_becomes_the_configured_score_and_is_marked(tokenizer):
    task = task_of(chat("q"))
    episodes = episodes_of(
        Scripted(tokenizer, "a"),
        tokenizer,
        task,
        judge=FailsSecond(),
        on_error="score",
        error_score=-1.0,
        needed_part="p",
    )
    sound, scored = await episodes.answer(request_for(task))
    assert (sound.reward, sound.reward_error) == (1.0, "")
    assert (scored.reward, scored.reward_parts) == (-1.0, {"p": -1.0})
    assert scored.reward_error.startswith("the reward mine raised KeyError")


async def test_a_request_that_fails_spoils_no_other(tokenizer):
    questions = [chat(f"q{at}", name=f"n{at}") for at in range(3)]
    task = task_of(*questions, chat("x" * 1000))

    class Broken(Replies):
        async def reply(self, question, messages):
            if question.data.get("name") == "n1":
                raise EnvironmentFailed("mine", "slow", deadline=1.0)
            return await super().reply(question, messages)

    engine = Scripted(tokenizer, "a")
    episodes = episodes_of(
        engine, tokenizer, task, judge=ByLength({"n2"}), environment=Broken("r"), max_turns=2
    )
    requests = [request_for(task, ordinal) for ordinal in range(4)]
    other_set = request_for(task, 0, fingerprint="sha256:" + "0" * 64)
    good, *failed = await episodes.answer_all([*requests, other_set])
    assert [experience.sample for experience in good] == [0, 1]
    slow, unjudged, long, other = failed
    assert_attributes(slow, name="mine", fault="slow")
    assert "mine failed" in str(unjudged)
    assert_attributes(long, ordinal=3, room=256, setting=None)
    assert_attributes(other, requested=other_set.fingerprint, own=task.fingerprint)
    with pytest.raises(EnvironmentFailed):
        await episodes.answer(requests[1])


@pytest.mark.parametrize(
    ("oldest", "exact", "refused"),
    [
        (StepRef(1, 4), True, False),
        (StepRef(1, 3), False, False),
        (StepRef(1, 3), True, True),
        (StepRef(1, 5), False, True),
        (StepRef(2, 0), False, True),
    ],
)
async def test_a_version_that_may_not_serve_a_request_does_not(tokenizer, oldest, exact, refused):
    task = task_of(chat("q"))
    episodes = episodes_of(Scripted(tokenizer, "a"), tokenizer, task)
    request = request_for(task, oldest=oldest, exact=exact)
    if refused:
        with raises(OtherVersion, served=StepRef(1, 4), exact=exact, oldest=oldest):
            await episodes.answer(request)
    else:
        assert len(await episodes.answer(request)) == 2


async def test_a_role_that_the_template_refuses_is_told_with_the_way_out(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    task = task_of(chat("q"))
    episodes = episodes_of(
        Scripted(tokenizer, "a"), tokenizer, task, environment=Replies("r"), max_turns=2
    )
    with raises(ReplyRefused, role="tool", reason="no tools"):
        await episodes.answer(request_for(task))


async def test_answers_of_several_turns_do_not_depend_on_other_requests(
    own_model_folder, tokenizer
):
    task = task_of(*(chat(f"{at} + {at}" * (at + 1)) for at in range(5)))
    engine = load_engine(
        "huggingface",
        EngineOptions(model_folder=own_model_folder(), serves=VERSION, deterministic=True),
    )

    class WhenItEnds(Replies):
        async def reply(self, question, messages):
            return [{"role": "tool", "content": messages[-1]["content"][:3]}]

    # An end of sequence is one of 400 tokens: most turns would meet their limit.
    model = engine._model
    end = torch.tensor([tokenizer.eos_token_id])
    model.lm_head.register_forward_hook(lambda _m, _i, out: out.index_fill_(2, end, 4.0))
    episodes = episodes_of(engine, tokenizer, task, environment=WhenItEnds(), max_turns=3)
    requests = [request_for(task, ordinal, samples=3) for ordinal in range(5)]
    together = await episodes.answer_all(requests)
    assert max(len(experience.turns) for group in together for experience in group) == 6
    assert await episodes.answer_all(requests[3:] + requests[:1]) == [*together[3:], together[0]]
    assert [await episodes.answer(request) for request in requests] == together


# --- training on them --------------------------------------------------------------------------


def turn(role, tokens, logprob=-1.0):
    sampled = len(tokens) if role == "policy" else 0
    return Turn(
        role=role,
        tokens=tokens,
        logprobs=[logprob] * sampled,
        versions=[(VERSION, sampled)] if sampled else [],
    )


def experience(sample, reward, *turns):
    return Experience(
        run_id="run",
        epoch=1,
        ordinal=0,
        attempt=1,
        sample=sample,
        samples=2,
        explorer="e",
        turns=list(turns),
        reward=reward,
    )


TOOL_USE = [
    experience(
        *(0, 1.0, turn("prompt", [5, 6]), turn("policy", [7, 8], -0.5)),
        *(turn("environment", [20, 21, 22]), turn("policy", [9])),
    ),
    experience(1, 0.0, turn("prompt", [5, 6]), turn("policy", [10])),
]


def test_gradients_on_tool_tokens_are_exactly_zero(own_model_folder):
    model, _ = load_policy(own_model_folder())
    batch, _ = prepare(collate([TOOL_USE], pad_token_id=0), AlgorithmConfig())
    captured_logits = []
    model.lm_head.register_forward_hook(
        lambda _m, _i, logits: captured_logits.append(logits) or None
    )
    logprobs = response_logprobs(model, batch)
    assert (logprobs[0, 2:5] == 0.0).all()
    # At ratio one nothing is clipped.
    batch = dataclasses.replace(batch, behaviour_logprobs=logprobs.detach())
    loss = policy_update(batch, logprobs, AlgorithmConfig()).loss_sum
    (gradient,) = torch.autograd.grad(loss, captured_logits)
    # A column of logits predicts the token after it; the first column that is kept, the first
    # token of the response.
    by_token = gradient[:, :-1].abs().amax(-1)
    assert (by_token[~batch.response_mask] == 0.0).all()
    assert (by_token[batch.response_mask] > 0.0).all()
