"""Weight versions that are installed while the Hugging Face engine generates."""

import secrets
import threading
from itertools import chain, repeat
from types import SimpleNamespace

import anyio
import pytest
from msgspec.structs import replace

from tests.support.errors import raises
from trinity_workers.rollout_engines.base import UpdateModeNotSupported

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.experiences import FIRST  # noqa: E402
from tests.support.pipeline import PATIENCE, events_of, reports_accepted, until  # noqa: E402
from tests.support.rollout_engines import (  # noqa: E402
    Steps,
    engine_of,
    in_thread,
    logprobs_of,
    requests_for,
    weights,
)
from tests.support.weight_versions import publish, ready  # noqa: E402
from trinity_events.errors import CorruptVersion, VersionUnavailable  # noqa: E402
from trinity_events.server import open_client  # noqa: E402
from trinity_events.weights import model_digest, version_reader  # noqa: E402
from trinity_schemas import (  # noqa: E402
    GenerationPaused,
    GenerationResumed,
    RolloutRequest,
    Sampling,
    StepRef,
    chunk_key,
)
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.prepare import prepare  # noqa: E402
from trinity_workers.algorithms.settings import (  # noqa: E402
    AlgorithmConfig,
    ImportanceSamplingConfig,
)
from trinity_workers.algorithms.update import policy_update  # noqa: E402
from trinity_workers.learning.logprobs import response_logprobs  # noqa: E402
from trinity_workers.learning.policy import load_policy, load_tokenizer  # noqa: E402
from trinity_workers.rewards.values import rewarded  # noqa: E402
from trinity_workers.rollout_engines import (  # noqa: E402
    EngineOptions,
    NotServing,
    load_engine,
)
from trinity_workers.rollouts.episodes import Episodes  # noqa: E402
from trinity_workers.tasks import Question, QuestionSet  # noqa: E402

MODES = ("keep", "retract")
TOLERANCE = 1e-4
"""Difference in nats that another order of sums may make."""


@pytest.fixture
def published(own_model_folder, trainer, log):
    """Publishes versions of steps; returns their models and announcements, that of step 0 too."""

    async def publish_steps(*steps, name="qwen2"):
        models, announced = {FIRST: load_policy(own_model_folder(name))[0]}, []
        for step in steps:
            models[StepRef(1, step)], tensors = weights(own_model_folder(name), step)
            await in_thread(publish, trainer, tensors, step)
            announced.append(await ready(log, step))
        return models, announced

    return publish_steps


async def generated(engine, requests, installs):
    """Turns that were generated while versions were installed, each after some forward passes."""
    steps, generations = Steps(engine), []

    async def generate():
        generations.extend(await engine.generate(requests))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        for announced, after in installs:
            await steps.install(announced, after=after)
        steps.allow(1000)
    return generations


def by_token(generation):
    """Version of each token."""
    return [*chain.from_iterable(repeat(version, count) for version, count in generation.versions)]


def with_the_same_cache(models, request, generation):
    """Log-probabilities by token, each computed with the model of its version and all caches."""
    cache, inputs, logprobs = None, request.tokens, []
    for token, version in zip(generation.tokens, by_token(generation), strict=True):
        with torch.no_grad():
            output = models[version](torch.tensor([inputs]), past_key_values=cache, use_cache=True)
        cache, inputs = output.past_key_values, [token]
        logprobs.append(output.logits[0, -1].log_softmax(-1)[token].item())
    return logprobs


def with_new_caches(models, request, generation):
    """Log-probabilities by token, each computed with the model of its version alone."""
    whole = {
        version: logprobs_of(models[version], request, generation.tokens) for version in models
    }
    return [whole[version][at] for at, version in enumerate(by_token(generation))]


REFERENCES = {"keep": with_the_same_cache, "retract": with_new_caches}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["qwen2", "qwen3-moe"])
async def test_each_token_has_the_version_and_the_probability_of_what_sampled_it(
    own_model_folder, published, follower, mode, name
):
    models, announced = await published(1, 2, name=name)
    engine = engine_of(own_model_folder(name), synchronizer=follower, pause_mode=mode)
    # One turn ends before the first version comes, and one between the two.
    requests = [
        *requests_for([0], samples=1, tokens=3),
        *requests_for([3], samples=1, tokens=9),
        *requests_for([1, 2], samples=2, tokens=25),
    ]
    generations = await generated(engine, requests, zip(announced, (5, 7), strict=True))
    versions = [[version.step for version, _ in generation.versions] for generation in generations]
    assert versions[:2] == [[0], [0, 1]] and [0, 1, 2] in versions[2:]
    for request, generation in zip(requests, generations, strict=True):
        expected = REFERENCES[mode](models, request, generation)
        assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)
        if len(generation.versions) > 1:
            before, steps = generation.versions[0][1], slice(generation.versions[0][1] + 1, None)
            assert 5 <= before <= 6
            other = REFERENCES[MODES[mode == MODES[0]]](models, request, generation)
            assert generation.logprobs[steps] != pytest.approx(other[steps], abs=TOLERANCE)
    assert await engine.prove() == model_digest(models[StepRef(1, 2)])


async def test_turns_that_finish_first_keep_the_version_that_they_began_with(
    own_model_folder, published, follower
):
    models, (announced,) = await published(1)
    engine = engine_of(own_model_folder(), synchronizer=follower, options={"max_batch": 2})
    requests = requests_for([0, 1], samples=2, tokens=10)
    steps, generations = Steps(engine), []

    async def generate():
        generations.extend(await engine.generate(requests))

    pulled, changing = threading.Event(), engine._changing

    def changes(ready):
        pulled.set()
        return changing(ready)

    engine._changing = changes
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await steps.take(3)
        tasks.start_soon(engine.install, announced)
        await until(pulled.is_set)
        await steps.take(4)
        assert engine.serves == FIRST
        steps.allow(1000)
    assert engine.serves == StepRef(1, 1)
    for request, generation in zip(requests, generations, strict=True):
        assert generation.versions == [(FIRST, len(generation.tokens))]
        expected = logprobs_of(models[FIRST], request, generation.tokens)
        assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("how", "cause"), [("changed", CorruptVersion), ("gone", VersionUnavailable)]
)
async def test_a_version_that_cannot_be_installed_leaves_a_turn_as_it_was(
    own_model_folder, published, follower, redis_url, run_id, mode, how, cause
):
    models, (announced,) = await published(1)
    key = chunk_key(run_id, 1, 1, 0, 0)
    with open_client(redis_url) as client:
        if how == "gone":
            assert client.delete(key)
        else:
            client.setrange(key, 100, secrets.token_bytes(8))
    engine = engine_of(own_model_folder(), synchronizer=follower, pause_mode=mode)
    requests = requests_for([0, 1], samples=1, tokens=12)
    steps, generations = Steps(engine), []

    async def generate():
        generations.extend(await engine.generate(requests))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await steps.take(4)
        with pytest.raises(cause):
            await engine.install(announced)  # it fails although no token boundary comes
        steps.allow(1000)
    assert engine.serves == FIRST
    for request, generation in zip(requests, generations, strict=True):
        assert generation.versions == [(FIRST, len(generation.tokens))]
        expected = logprobs_of(models[FIRST], request, generation.tokens)
        assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
async def test_a_cancelled_turn_neither_loses_nor_tears_the_version_that_is_installed(
    own_model_folder, published, follower, mode
):
    models, (announced,) = await published(1)
    engine = engine_of(own_model_folder(), synchronizer=follower, pause_mode=mode)
    steps = Steps(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.generate, requests_for([0], samples=2, tokens=50))
        await steps.take(4)
        tasks.start_soon(engine.install, announced)
        await until(lambda: engine._gate._is_closed() or engine.serves != FIRST)
        tasks.cancel_scope.cancel()
        steps.allow(1)
    assert engine.serves == StepRef(1, 1)
    assert await engine.prove() == model_digest(models[engine.serves])
    steps.allow(1000)
    (generation,) = await engine.generate(requests_for([1], samples=1))
    assert generation.versions == [(engine.serves, len(generation.tokens))]
    assert steps.count <= 6 + len(generation.tokens), "the cancelled turn has ended"


# --- turns that a version ends -----------------------------------------------------------------


async def pauses_of(follower, log):
    follower.flush()
    await reports_accepted(log)
    paused = [entry.event for entry in await events_of(log, GenerationPaused)]
    resumed = [entry.event for entry in await events_of(log, GenerationResumed)]
    return paused, resumed


async def test_a_version_aborts_the_turns_that_it_meets_and_no_others(
    own_model_folder, published, follower, log
):
    """Invariant 3 of the gate."""
    models, (announced,) = await published(1)
    engine = engine_of(
        own_model_folder(), synchronizer=follower, pause_mode="abort", options={"max_batch": 4}
    )
    # The first batch has a turn that is over when the version comes; the second begins later.
    requests = [
        *requests_for([0], samples=1, tokens=3),
        *requests_for([0, 1], samples=4, tokens=12),
    ]
    generations = await generated(engine, requests, [(announced, 5)])
    version = StepRef(1, 1)
    met, later = generations[:4], generations[4:]
    assert [generation.aborted for generation in met] == [False, True, True, True]
    assert met[0].versions == [(FIRST, len(met[0].tokens))]
    for request, generation in zip(requests[4:], later, strict=True):
        assert not generation.aborted
        assert generation.versions == [(version, len(generation.tokens))]
        expected = logprobs_of(models[version], request, generation.tokens)
        assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)
    [paused], [resumed] = await pauses_of(follower, log)
    assert (paused.version, paused.mode, paused.in_flight) == (version, "abort", len(requests))
    assert paused.lease == follower.settings.deadline
    assert (resumed.version, resumed.serves, resumed.aborted) == (version, version, 3)


@pytest.mark.parametrize("mode", ["wait", "keep", "retract", "abort"])
async def test_a_version_that_fails_halfway_is_served_in_no_mode(
    own_model_folder, published, follower, log, mode, monkeypatch
):
    models, (first, second) = await published(1, 2)
    engine = engine_of(own_model_folder(), synchronizer=follower, pause_mode=mode)
    real = version_reader.install

    def install_half(fit):
        real(fit)
        raise OSError("planted: the copy broke")

    monkeypatch.setattr(version_reader, "install", install_half)
    with pytest.raises(OSError, match="planted"):
        await engine.install(first)
    monkeypatch.undo()
    await engine.resume()
    with pytest.raises(NotServing):
        await engine.generate(requests_for([0]))
    paused, resumed = await pauses_of(follower, log)
    assert [(event.version.step, event.mode) for event in paused] == [(1, mode)]
    assert [(event.version.step, event.serves) for event in resumed] == [(1, None)]
    await engine.install(second)  # whole again, by the next version
    assert await engine.prove() == model_digest(models[StepRef(1, 2)])


async def test_a_pause_ends_with_its_lease(own_model_folder):
    engine = engine_of(own_model_folder())
    await engine.pause(0.2)
    with anyio.fail_after(PATIENCE):
        assert await engine.generate(requests_for([0], samples=1))


# --- episodes ----------------------------------------------------------------------------------


class ByLength:
    async def judge(self, question, answers):
        return [rewarded(float(answer.tokens)) for answer in answers]


def episodes_of(engine, folder, *, environment=None):
    task = QuestionSet("mine", [Question(prompt="1 + 2 =")], shuffle=False, evaluation=[])
    return Episodes(
        engine=engine,
        tokenizer=load_tokenizer(folder),
        task=task,
        judge=ByLength(),
        explorer="explorer-0",
        environment=environment,
        max_turns=2,
    )


def request_of(episodes, tokens, **changes):
    return RolloutRequest(
        run_id="run",
        epoch=1,
        ordinal=0,
        attempt=1,
        samples=4,
        sampling=Sampling(max_new_tokens=tokens, seed=5),
        oldest=FIRST,
        fingerprint=episodes.task.fingerprint,
        deadline=PATIENCE,
        **changes,
    )


async def test_a_version_that_comes_between_turns_samples_the_next_one(
    own_model_folder, published, follower
):
    models, (announced,) = await published(1)
    engine = engine_of(own_model_folder(), synchronizer=follower, pause_mode="keep")
    end = load_tokenizer(own_model_folder()).eos_token_id

    class Installs:
        async def reply(self, question, messages):
            if engine.serves == FIRST:
                await engine.install(announced)
            return [{"role": "tool", "content": " 3"}]

    # Otherwise the turns would meet their limit, which ends an episode.
    ends = SimpleNamespace(countdown=4)

    def end_soon(_module, _inputs, logits):
        ends.countdown -= 1
        if ends.countdown % 4 == 0:
            logits[..., end] = 1e9

    engine._model.lm_head.register_forward_hook(end_soon)
    episodes = episodes_of(engine, own_model_folder(), environment=Installs())
    for sample in await episodes.answer(request_of(episodes, 20)):
        prompt, first, tool, second = sample.turns
        assert first.versions == [(FIRST, len(first.tokens))]
        assert second.versions == [(StepRef(1, 1), len(second.tokens))]
        assert sample.oldest_version == FIRST
        before = [*prompt.tokens, *first.tokens, *tool.tokens]
        request = replace(requests_for([0], samples=1)[0], tokens=before)
        expected = logprobs_of(models[StepRef(1, 1)], request, second.tokens)
        assert second.logprobs[:-1] == pytest.approx(expected[:-1], abs=TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
async def test_a_sample_of_two_versions_is_trained_with_the_probabilities_that_sampled_it(
    own_model_folder, published, follower, mode
):
    models, (announced,) = await published(1)
    engine = engine_of(own_model_folder(), synchronizer=follower, pause_mode=mode)
    episodes = episodes_of(engine, own_model_folder())
    steps, samples = Steps(engine), []

    async def answer():
        samples.extend(await episodes.answer(request_of(episodes, 12)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer)
        await steps.install(announced, after=5)
        steps.allow(1000)
    sample = next(candidate for candidate in samples if len(candidate.turns[1].tokens) == 12)
    (old, before), (new, _) = sample.turns[1].versions
    assert (old, new, sample.oldest_version) == (FIRST, StepRef(1, 1), FIRST)

    # The rewards are not equal, so that no advantage is zero.
    group = [replace(sample, reward=float(sample.sample)) for sample in samples]
    config = AlgorithmConfig(
        loss="reinforce", importance_sampling=ImportanceSamplingConfig(weights="token", cap=None)
    )
    batch, _ = prepare(collate([group], pad_token_id=0), config)
    logprobs = response_logprobs(models[new], batch)
    row = sample.sample
    assert batch.behaviour_logprobs[row].tolist() == pytest.approx(sample.turns[1].logprobs)
    ratio = (logprobs - batch.behaviour_logprobs)[row].detach()
    assert (ratio[:before].abs() > TOLERANCE).any()
    if mode == "retract":  # on-policy from the boundary on
        assert ratio[before:].abs().max() < TOLERANCE
    loss = policy_update(batch, logprobs, config).loss_sum
    (gradient,) = torch.autograd.grad(loss, [logprobs])
    expected = -batch.advantages[row] * ratio.exp()
    assert gradient[row].tolist() == pytest.approx(expected.tolist(), rel=1e-4)


# --- engines that cannot -----------------------------------------------------------------------

OWN_ENGINE = """
from trinity_workers.rollout_engines import updates_amid_turns

def plain(options):
    return options

@updates_amid_turns("keep")
def keeps(options):
    return options
"""


def test_an_engine_that_cannot_go_on_with_a_version_says_so(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_ENGINE)

    def load(name, mode):
        options = EngineOptions(model_folder=tmp_path, pause_mode=mode)
        return load_engine(f"./mine.py:{name}", options, folder=tmp_path)

    assert load("plain", "wait") and load("keeps", "wait") and load("keeps", "keep")
    for name, mode, modes in (
        ("plain", "keep", ("wait",)),
        ("keeps", "retract", ("wait", "keep")),
    ):
        engine = f"./mine.py:{name}"
        with raises(UpdateModeNotSupported, engine=engine, pause_mode=mode, modes=modes):
            load(name, mode)
