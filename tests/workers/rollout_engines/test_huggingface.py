"""The Hugging Face engine: what it generates, what it depends on, and how new weights come in."""

import itertools
import random
import re

import anyio
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.errors import raises  # noqa: E402
from tests.support.experiences import FIRST  # noqa: E402
from tests.support.own_models import MODELS  # noqa: E402
from tests.support.pipeline import PATIENCE, until  # noqa: E402
from tests.support.rollout_engines import (  # noqa: E402
    Steps,
    engine_of,
    in_thread,
    logprobs_of,
    requests_for,
    weights,
)
from tests.support.weight_versions import publish, ready  # noqa: E402
from trinity_events.errors import VersionUnavailable  # noqa: E402
from trinity_events.weights import model_digest  # noqa: E402
from trinity_schemas import RolloutRequest, Sampling, StepRef  # noqa: E402
from trinity_workers.learning.policy import create_policy, load_policy  # noqa: E402
from trinity_workers.rewards.values import rewarded  # noqa: E402
from trinity_workers.rollout_engines import (  # noqa: E402
    EngineOptions,
    GenerationRequest,
    NotServing,
    load_engine,
)
from trinity_workers.rollout_engines.base import EngineOptionsRefused, PromptRefused  # noqa: E402
from trinity_workers.rollout_engines.huggingface import HuggingFaceEngine  # noqa: E402
from trinity_workers.rollout_engines.loading import SamplingNotSupported  # noqa: E402
from trinity_workers.rollouts.episodes import Episodes  # noqa: E402
from trinity_workers.tasks import SpellBackward  # noqa: E402
from trinity_workers.tasks.errors import ObjectUnusable  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
async def test_every_architecture_and_dtype_samples_what_the_model_says(
    own_model_folder, name, dtype
):
    engine = engine_of(own_model_folder(name), dtype=dtype)
    model, _ = load_policy(own_model_folder(name), dtype)
    requests = requests_for(range(4), temperature=0.7)
    for request, generation in zip(requests, await engine.generate(requests), strict=True):
        assert 1 <= len(generation.tokens) == len(generation.logprobs) <= 8
        assert generation.versions == [(FIRST, len(generation.tokens))]
        expected = logprobs_of(model, request, generation.tokens, 0.7)
        assert generation.logprobs == pytest.approx(
            expected, abs=1e-4 if dtype == "float32" else 0.15
        )


@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe"])
async def test_answers_are_the_same_for_any_split_of_ordinals_over_calls_and_engines(
    own_model_folder, name
):
    engines = [engine_of(own_model_folder(name), deterministic=True) for _ in range(3)]
    ordinals = list(range(12))
    requests = requests_for(ordinals)
    together = {
        (request.ordinal, request.sample): generation
        for request, generation in zip(requests, await engines[0].generate(requests), strict=True)
    }
    lot = random.Random(3)
    for _ in range(4):
        lot.shuffle(ordinals)
        at = 0
        while at < len(ordinals):
            size = lot.randint(1, 5)
            batch = requests_for(ordinals[at : at + size])
            lot.shuffle(batch)
            for request, generation in zip(
                batch, await lot.choice(engines).generate(batch), strict=True
            ):
                assert generation == together[request.ordinal, request.sample]
            at += size


async def test_noise_depends_on_seed_ordinal_sample_and_turn_alone(own_model_folder):
    engine = engine_of(own_model_folder(), deterministic=True)
    base = GenerationRequest(
        tokens=[10, 11, 12], sampling=Sampling(max_new_tokens=12, seed=1), ordinal=5, sample=2
    )
    before = torch.get_rng_state()
    (first,) = await engine.generate([base])
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert await engine.generate([base]) == [first]
    for other in (
        {"ordinal": 6},
        {"sample": 3},
        {"turn": 1},
        {"sampling": Sampling(max_new_tokens=12, seed=2)},
    ):
        fields = {name: getattr(base, name) for name in base.__struct_fields__}
        (generation,) = await engine.generate([GenerationRequest(**{**fields, **other})])
        assert generation.tokens != first.tokens


async def test_temperature_zero_takes_the_most_likely_token(own_model_folder):
    engine = engine_of(own_model_folder())
    model, _ = load_policy(own_model_folder())
    (generation,) = await engine.generate(requests_for([1], samples=1, temperature=0.0))
    tokens = [*requests_for([1], samples=1)[0].tokens]
    for token in generation.tokens:
        with torch.no_grad():
            assert model(torch.tensor([tokens])).logits[0, -1].argmax() == token
        tokens.append(token)


async def test_generation_defaults_of_the_folder_do_not_bend_the_policy(own_model_folder, tmp_path):
    model, tokenizer = load_policy(own_model_folder())
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.temperature = 0.1
    model.generation_config.do_sample = True
    model.generation_config.no_repeat_ngram_size = 1
    model.generation_config.suppress_tokens = list(range(3, 60))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    requests = requests_for(range(3))
    assert await engine_of(tmp_path).generate(requests) == await engine_of(
        own_model_folder()
    ).generate(requests)


async def test_a_turn_ends_with_its_end_of_sequence_or_at_its_own_limit(own_model_folder):
    engine = engine_of(own_model_folder())
    _, tokenizer = load_policy(own_model_folder())
    # At a high temperature each token is an end of sequence once in 400.
    settings = [Sampling(max_new_tokens=limit, temperature=9.0) for limit in (1, 40, 3, 60) * 40]
    requests = [
        GenerationRequest(tokens=[10, 11], sampling=sampling, ordinal=0, sample=at)
        for at, sampling in enumerate(settings)
    ]
    generations = await engine.generate(requests)
    assert 5 < sum(generation.finished for generation in generations) < 80
    for generation, sampling in zip(generations, settings, strict=True):
        assert tokenizer.eos_token_id not in generation.tokens[:-1]
        assert generation.finished == (generation.tokens[-1] == tokenizer.eos_token_id)
        assert generation.finished or len(generation.tokens) == sampling.max_new_tokens


@pytest.mark.parametrize("max_batch", [64, 1])
async def test_a_stop_string_ends_a_turn_within_or_across_tokens(own_model_folder, max_batch):
    _, tokenizer = load_policy(own_model_folder())
    plain = await engine_of(own_model_folder()).generate(requests_for([0], samples=32, tokens=24))
    # Text from the middle of a token to the end of another one, and a single letter.
    spans = [tokenizer.decode(generation.tokens[4:7])[1:] for generation in plain]
    stops = (next(span for span in spans if len(span) > 2 and "\ufffd" not in span), "q")
    engine = engine_of(own_model_folder(), options={"max_batch": max_batch})
    stopped = await engine.generate(requests_for([0], samples=32, tokens=24, stop=stops))
    assert any(generation.stop for generation in stopped)
    for before, after in zip(plain, stopped, strict=True):
        assert after.tokens == before.tokens[: len(after.tokens)]
        assert after.logprobs == pytest.approx(before.logprobs[: len(after.tokens)], abs=1e-5)
        assert sum(count for _, count in after.versions) == len(after.tokens)
        text, shorter = tokenizer.decode(after.tokens), tokenizer.decode(after.tokens[:-1])
        assert not any(stop in shorter for stop in stops)
        if after.stop is None:
            assert not any(stop in text for stop in stops)
            assert len(after.tokens) == len(before.tokens)
        else:
            assert after.finished and after.stop in text


async def test_log_probabilities_are_those_of_a_plain_computation_with_all_settings(
    own_model_folder,
):
    """The reference is written token by token, with the processors of transformers."""
    model, _ = load_policy(own_model_folder())
    settings = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3}
    requests = requests_for(range(3), **settings)
    generations = await engine_of(own_model_folder()).generate(requests)
    processors = [
        RepetitionPenaltyLogitsProcessor(1.3),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(30),
        TopPLogitsWarper(0.9),
    ]
    for request, generation in zip(requests, generations, strict=True):
        tokens = list(request.tokens)
        for token, logprob in zip(generation.tokens, generation.logprobs, strict=True):
            ids = torch.tensor([tokens])
            with torch.no_grad():
                scores = model(ids).logits[:, -1].float()
            for process in processors:
                scores = process(ids, scores)
            assert logprob == pytest.approx(float(scores.log_softmax(-1)[0, token]), abs=1e-4)
            tokens.append(token)


def test_an_engine_refuses_the_settings_that_it_does_not_honour(own_model_folder, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from trinity_workers.rollout_engines import samples_with\n"
        "def plain(options): return 1\n"
        "@samples_with('top_p')\n"
        "def some(options): return 2\n"
    )
    options = EngineOptions(
        model_folder=own_model_folder(), sampling_settings=frozenset({"stop", "top_p"})
    )
    with raises(SamplingNotSupported, settings=("top_p", "stop"), supported=()):
        load_engine("./mine.py:plain", options, folder=tmp_path)
    with raises(SamplingNotSupported, settings=("stop",), supported=("top_p",)):
        load_engine("./mine.py:some", options, folder=tmp_path)
    fewer = EngineOptions(model_folder=own_model_folder(), sampling_settings=frozenset({"top_p"}))
    assert load_engine("./mine.py:some", fewer, folder=tmp_path) == 2


async def test_every_end_of_the_folders_defaults_ends_a_turn(own_model_folder, tmp_path):
    model, tokenizer = load_policy(own_model_folder())
    more = tokenizer.encode("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *more]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generations = await engine_of(tmp_path).generate(requests_for([0], samples=64))
    ends = {*more, tokenizer.eos_token_id}
    for generation in generations:
        assert not ends & set(generation.tokens[:-1])
        assert generation.finished == (generation.tokens[-1] in ends)
    assert any(generation.tokens[-1] in more for generation in generations)


@pytest.fixture
def speller(tmp_path):
    """The built-in task's policy, which has a padding token of its own."""
    create_policy(tmp_path, seed=0)
    return load_policy(tmp_path)


@pytest.mark.parametrize(
    ("sampled_text", "expected_text", "reward"),
    [
        ("{answer}{eos}{pad}{pad}", "{answer}{eos}", 1.0),
        ("{pad}{answer}{eos}{pad}", "{pad}{answer}{eos}", 0.0),
        ("{answer}{pad}{pad}{pad}{pad}{pad}{pad}", None, 0.0),
    ],
    ids=["padding-after-the-end", "padding-within", "no-end"],
)
async def test_a_sampled_padding_token_is_kept_and_spoils_the_answer(
    speller, sampled_text, expected_text, reward
):
    pytest.importorskip("reasoning_gym")
    model, tokenizer = speller
    task = SpellBackward()
    words = {
        "answer": task.question(0).answer,
        "eos": tokenizer.eos_token,
        "pad": tokenizer.pad_token,
    }
    forced = tokenizer.encode(sampled_text.format(**words), add_special_tokens=False)
    step = itertools.count()

    def force(_module, _inputs, output):
        output.logits.fill_(-1e9)
        output.logits[..., forced[next(step)]] = 0.0

    model.register_forward_hook(force)
    episodes = Episodes(
        engine=HuggingFaceEngine(model, tokenizer, serves=FIRST),
        tokenizer=tokenizer,
        task=task,
        judge=BySpelling(task),
        explorer="explorer-0",
    )
    (answer,) = await episodes.answer(
        RolloutRequest(
            run_id="r",
            epoch=1,
            ordinal=0,
            attempt=1,
            samples=1,
            sampling=Sampling(max_new_tokens=7),
            oldest=FIRST,
            fingerprint=task.fingerprint,
            deadline=60.0,
        )
    )
    expected = forced[:7]
    if expected_text is not None:
        expected = tokenizer.encode(expected_text.format(**words), add_special_tokens=False)
    assert answer.turns[1].tokens == expected
    assert (answer.finished, answer.reward) == (expected_text is not None, reward)


class BySpelling:
    """Judge in this process, by the built-in task's own reward."""

    def __init__(self, task):
        self.task = task

    async def judge(self, question, answers):
        return [rewarded(self.task.reward(question, answer)) for answer in answers]


async def test_a_turn_keeps_within_the_models_context(own_model_folder):
    engine = engine_of(own_model_folder())
    assert engine.context_length == 256
    request = requests_for([0], samples=1, tokens=300)[0]
    long = GenerationRequest(tokens=[10] * 250, sampling=request.sampling, ordinal=4, sample=0)
    (generation,) = await engine.generate([long])
    assert len(generation.tokens) <= 6
    too_long = GenerationRequest(tokens=[10] * 256, sampling=request.sampling, ordinal=4, sample=0)
    with raises(PromptRefused, ordinal=4, tokens=256, turn=0):
        await engine.generate([too_long])


async def test_large_calls_are_generated_in_batches_with_the_same_answers(own_model_folder):
    requests = requests_for(range(6))
    whole = await engine_of(own_model_folder()).generate(requests)
    small = await engine_of(own_model_folder(), options={"max_batch": 4}).generate(requests)
    assert sum(a.tokens == b.tokens for a, b in zip(whole, small, strict=True)) > len(whole) - 2


async def test_an_engine_without_a_version_refuses_to_generate(own_model_folder):
    engine = engine_of(own_model_folder(), serves=None)
    with pytest.raises(NotServing):
        await engine.generate(requests_for([0]))


def test_unknown_engines_and_options_are_told_in_one_sentence(own_model_folder):
    with raises(ObjectUnusable, kind="rollout engine", fault="unknown", nearest="huggingface"):
        load_engine("hugging", EngineOptions(model_folder=own_model_folder()))
    with raises(EngineOptionsRefused, reason=re.compile("`max_batches`"), allowed=("max_batch",)):
        engine_of(own_model_folder(), options={"max_batches": 3})


def test_an_engine_of_the_users_own_is_found_in_a_file(own_model_folder, tmp_path):
    (tmp_path / "mine.py").write_text("def make(options):\n    return options.model_folder\n")
    options = EngineOptions(model_folder=own_model_folder())
    assert load_engine("./mine.py:make", options, folder=tmp_path) == options.model_folder


# --- pauses ------------------------------------------------------------------------------------


async def test_a_paused_engine_stands_still_between_tokens_until_it_is_resumed(own_model_folder):
    """Invariants 1 and 2 of the gate."""
    engine = engine_of(own_model_folder())
    steps, generations = Steps(engine), []

    async def generate():
        generations.extend(await engine.generate(requests_for([0], samples=2, tokens=20)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        steps.allowed.release(3)
        await until(lambda: steps.count == 3)
        tasks.start_soon(engine.pause, 1000.0)
        await until(engine._gate._is_closed)
        steps.allowed.release(100)
        await engine.pause(1000.0)  # returns once it stands still
        steps_before = steps.count
        assert steps_before < 20
        await anyio.sleep(0.1)
        assert steps.count == steps_before and not generations
        await engine.resume()
    assert steps.count == max(len(generation.tokens) for generation in generations)


async def test_a_pause_ends_by_itself_after_its_lease(own_model_folder):
    """Invariant 2 of the gate."""
    engine = engine_of(own_model_folder())
    await engine.pause(0.2)
    with anyio.fail_after(PATIENCE):
        assert len(await engine.generate(requests_for([0]))) == 3


async def test_a_deterministic_engine_pauses_between_batches(own_model_folder):
    engine = engine_of(own_model_folder(), deterministic=True)
    steps = Steps(engine)
    steps.allowed.release(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.generate, requests_for([0, 1], tokens=5))
        await until(lambda: steps.count == 1)
        tasks.start_soon(engine.pause, 1000.0)
        await until(engine._gate._is_closed)
        steps.allowed.release(100)
        await engine.pause(1000.0)
        assert steps.count <= 5
        await engine.resume()
    assert 5 < steps.count <= 10


async def test_a_cancelled_call_ends_after_its_next_token(own_model_folder):
    engine = engine_of(own_model_folder())
    steps = Steps(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.generate, requests_for([0], tokens=100, samples=1))
        steps.allowed.release(2)
        await until(lambda: steps.count == 2)
        tasks.cancel_scope.cancel()
    steps.allowed.release(200)
    await engine.generate(requests_for([1], tokens=1, samples=1))
    assert steps.count <= 5


# --- weight versions ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_installed_version_is_served_and_proven(
    own_model_folder, trainer, follower, log, dtype
):
    folder = own_model_folder()
    engine = engine_of(folder, serves=None, synchronizer=follower, dtype=dtype)
    for step in (1, 2):
        model, tensors = weights(folder, step)
        await in_thread(publish, trainer, tensors, step)
        await engine.install(await ready(log, step))
        assert engine.serves == StepRef(1, step)
        assert await engine.prove() == model_digest(model.to(getattr(torch, dtype)))
        (generation,) = await engine.generate(requests_for([step], samples=1))
        assert generation.versions == [(StepRef(1, step), len(generation.tokens))]


async def test_a_version_that_is_gone_leaves_the_earlier_one_serving(
    own_model_folder, trainer, follower, log
):
    folder = own_model_folder()
    engine = engine_of(folder, synchronizer=follower)
    before = await engine.prove()
    _, tensors = weights(folder, 1)
    await in_thread(publish, trainer, tensors, 1)
    announced = await ready(log, 1)
    for at in (2, 3, 4):  # the last two stay
        await in_thread(publish, trainer, tensors, at)
        await ready(log, at)
    with pytest.raises(VersionUnavailable):
        await engine.install(announced)
    assert (engine.serves, await engine.prove()) == (FIRST, before)


async def test_a_released_engine_serves_nothing_until_it_is_given_a_version(
    own_model_folder, trainer, follower, log
):
    folder = own_model_folder()
    engine = engine_of(folder, synchronizer=follower)
    module = await engine.release()
    assert engine.serves is None
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)  # as chunks that arrive do
    with pytest.raises(NotServing):
        await engine.generate(requests_for([0]))
    model, tensors = weights(folder, 1)
    await in_thread(publish, trainer, tensors, 1)
    await engine.install(await ready(log, 1))
    assert await engine.prove() == model_digest(model)
