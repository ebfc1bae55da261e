"""Proof of what an engine serves: probes, layers in turn, and the weakest proof that is served."""

from contextlib import ExitStack, closing

import pytest
import torch

from tests.support.errors import raises
from tests.support.experiences import FIRST
from tests.support.pipeline import events_of, reducer_task, reports_accepted
from tests.support.rollout_engines import (
    compute_probes,
    engine_of,
    in_thread,
    requests_for,
    weights,
)
from tests.support.weight_versions import ready
from trinity_events import Synchronizer
from trinity_events.errors import CorruptVersion, NotAsPublished, ProofTooWeak
from trinity_events.server import open_client
from trinity_events.weights.applying.verify_model import select_layers
from trinity_schemas import (
    StepRef,
    VersionPartPublished,
    VersionRefused,
    WeightsApplied,
    WeightsProof,
    chunk_key,
    make_probes,
)
from trinity_workers.learning.adapters import adapter_tree
from trinity_workers.learning.lora_settings import LoraConfig
from trinity_workers.rollout_engines import NotServing
from trinity_workers.rollout_engines.proof import (
    PROBE_TOLERANCES,
    ProofOptions,
    ProofRecord,
    compare_logprobs,
    find_weakest,
)

NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.{part}" for layer in range(3) for part in ("a.weight", "b.bias")),
    "model.norm.weight",
]


class Run:
    """A trainer that publishes whole models with probes, and an engine that installs them."""

    def __init__(self, trainer, explorer, engine, log, folder, lora):
        self.engine, self.explorer, self.log = engine, explorer, log
        self._trainer, self._folder, self._lora = trainer, folder, lora
        self.step = 0

    async def publish(self, *, with_probes=True, change=None, small=False):
        """Publish other weights; ``change`` alters the model after its probes were computed."""
        self.step += 1
        model, tensors = await in_thread(
            weights, self._folder, 0 if small else self.step, self._lora
        )
        if small:
            with torch.no_grad():
                for tensor in tensors.values():
                    tensor.view(-1)[0] += self.step
        probes = compute_probes(model) if with_probes else None
        if change is not None:
            with torch.no_grad():
                change(model)
        self._trainer.open_version(self.step)
        await in_thread(lambda: self._trainer.publish(tensors, self.step, probes=probes))
        self._trainer.commit(self.step)
        return await ready(self.log, self.step)

    async def events(self, kind):
        self.explorer.flush()
        await reports_accepted(self.log)
        return [entry.event for entry in await events_of(self.log, kind)]


@pytest.fixture
async def make_run(publisher, redis_url, weights_url, run_id, log, tmp_path, policy_folder):
    """Return a function that opens an engine with checks, at its first version."""
    urls = {"redis_url": redis_url, "weights_url": weights_url}
    explorer = Synchronizer(run_id, 0, role="explorer", **urls)

    def make(*, full_every=1, lora=LoraConfig(), **proof):  # noqa: B008  # frozen
        trainer = exits.enter_context(
            closing(
                Synchronizer(
                    run_id,
                    publisher.epoch,
                    tensor_digests=full_every > 1,
                    full_every=full_every,
                    **urls,
                )
            )
        )
        engine = engine_of(
            policy_folder,
            synchronizer=explorer,
            serves=FIRST,
            lora=lora,
            proof=ProofOptions(**proof),
        )
        return Run(trainer, explorer, engine, log, policy_folder, lora)

    async with reducer_task(redis_url, run_id, tmp_path):
        with ExitStack() as exits:
            exits.callback(explorer.close)
            yield make


async def test_answers_say_how_their_versions_were_proven(make_run):
    run = make_run(checks="all", min_status="proven")
    [first] = await run.engine.generate(requests_for([0], samples=1))
    assert first.proof == "unproven", "of the folder's weights nothing was checked"
    await run.engine.install(await run.publish())
    [answer] = await run.engine.generate(requests_for([0], samples=1))
    assert answer.proof == "proven"
    [applied] = await run.events(WeightsApplied)
    assert applied.proof.checks == ("names", "served", "probes")
    assert applied.proof.probes == 4
    assert applied.proof.difference < 1e-5


def tilt(model):
    model.model.layers[0].self_attn.o_proj.weight.add_(0.01)


async def test_probes_that_differ_refuse_the_version_and_the_next_one_heals_it(make_run):
    run = make_run(checks="probes", min_status="partly")
    await run.engine.install(await run.publish())
    announced = await run.publish(change=tilt)
    with raises(NotAsPublished, fault="probes", step=announced.step, engine="huggingface") as error:
        await run.engine.install(announced)
    assert run.engine.serves is None
    with pytest.raises(NotServing):
        await run.engine.generate(requests_for([0], samples=1))
    [refused] = await run.events(VersionRefused)
    assert (refused.version.step, refused.reason) == (announced.step, str(error.value))
    await run.engine.install(await run.publish())
    [answer] = await run.engine.generate(requests_for([0], samples=1))
    assert answer.proof == "partly", "probes alone prove no version"


async def test_probes_of_adapters_are_of_the_policy_with_them(make_run):
    pytest.importorskip("peft")
    run = make_run(checks="all", min_status="proven", lora=LoraConfig(rank=4))
    await run.engine.install(await run.publish())
    [applied] = await run.events(WeightsApplied)
    assert (applied.proof.status, applied.proof.probes) == ("proven", 4)
    with raises(NotAsPublished, fault="probes"):
        await run.engine.install(await run.publish(change=raise_adapters))


def raise_adapters(model):
    for parameter in adapter_tree(model).parameters():
        parameter.mul_(1.1)


@pytest.mark.parametrize(
    ("proof", "with_probes", "status", "fault"),
    [
        ({"checks": "names", "min_status": "partly"}, True, "unproven", "tensors"),
        ({"checks": "probes", "min_status": "partly"}, False, "unproven", "no probes"),
        ({"checks": "probes", "min_status": "proven"}, True, "partly", "probes"),
        ({"checks": "all", "min_status": "proven"}, False, "partly", "no probes"),
        ({"checks": "served", "min_status": "proven", "layers": 1}, True, "partly", "tensors"),
    ],
)
async def test_a_version_with_less_proof_than_is_asked_for_is_refused(
    make_run, proof, with_probes, status, fault
):
    """Invariant 1."""
    run = make_run(**proof)
    announced = await run.publish(with_probes=with_probes)
    with raises(ProofTooWeak, step=announced.step, status=status, fault=fault) as error:
        await run.engine.install(announced)
    assert run.engine.serves is None
    [refused] = await run.events(VersionRefused)
    assert refused.reason == str(error.value)


async def test_layers_are_compared_in_turn_and_the_others_are_named(make_run):
    """Invariant 2."""
    run = make_run(checks="served", min_status="partly", layers=2)
    compared = []
    names = set(dict(run.engine._model.named_parameters()))
    for _ in range(3):
        await run.engine.install(await run.publish())
        [*_, applied] = await run.events(WeightsApplied)
        assert applied.proof.status == "partly"
        assert applied.proof.unproven_count == len(applied.proof.unproven)
        compared.append(names - set(applied.proof.unproven))
    assert set.union(*compared) == names, "three turns go round all layers"
    assert compared[0].isdisjoint(compared[1])


async def test_a_version_of_deltas_alone_is_compared_too(make_run):
    run = make_run(checks="served", min_status="proven", full_every=4)
    for _ in range(2):
        await run.engine.install(await run.publish(small=True))
    published = await run.events(VersionPartPublished)
    assert [part.delta is not None for part in published] == [False, True]
    assert [event.proof.status for event in await run.events(WeightsApplied)] == ["proven"] * 2


async def test_a_damaged_version_leaves_the_previous_one_served_and_its_reason_in_an_event(
    make_run, weights_url
):
    run = make_run(checks="all", min_status="proven")
    await run.engine.install(await run.publish())
    served, digest = run.engine.serves, await run.engine.prove()
    announced = await run.publish()
    with open_client(weights_url) as chunks:
        key = chunk_key(run.log.run_id, announced.epoch, announced.step, 0, 0)
        chunks.setrange(key, 5, b"\x55")
    with pytest.raises(CorruptVersion) as error:
        await run.engine.install(announced)
    assert (run.engine.serves, await run.engine.prove()) == (served, digest)
    [refused] = await run.events(VersionRefused)
    assert (refused.version.step, refused.rank, refused.chunk) == (announced.step, 0, 0)
    assert refused.reason == str(error.value)
    [answer] = await run.engine.generate(requests_for([0], samples=1))
    assert (answer.versions[0][0], answer.proof) == (served, "proven")


async def test_probes_outside_of_the_model_are_refused(make_run, monkeypatch):
    run = make_run(checks="probes", min_status="partly")
    announced = await run.publish()
    monkeypatch.setattr(type(run.engine), "context_length", property(lambda self: 8))
    with raises(NotAsPublished, fault="probes"):
        await run.engine.install(announced)


# --- pure parts -----------------------------------------------------------------------------


def test_turns_of_layers_go_round_all_tensors_and_end_where_they_began():
    turns = [select_layers(NAMES, 2, turn) for turn in range(5)]
    assert set.union(*turns) == set(NAMES)
    assert turns[0] == {"model.embed_tokens.weight", *NAMES[1:3]}
    assert turns[0] & turns[2] == {"model.embed_tokens.weight"}, "of five layers the third turn"
    assert select_layers(NAMES, 9, 3) == set(NAMES)
    assert select_layers([], 2, 0) == set()


@pytest.mark.parametrize(
    ("dtypes", "difference", "agrees"),
    [
        (("float32", "float32"), 0.5, True),
        (("float32", "float32"), 2.0, False),
        (("float32", "bfloat16"), 2.0, True),
        (("bfloat16", "float32"), 2.0, True),
    ],
)
def test_the_tolerance_is_that_of_the_coarser_dtype(dtypes, difference, agrees):
    served, published = dtypes
    tolerance = PROBE_TOLERANCES["float32"] * difference
    probes = make_probes([[1] * 101], [[-1.0] * 100], published)
    computed = [[-1.0] * 99 + [-1.0 - tolerance]]
    proof, options = WeightsProof(status="unproven", checks=("names",)), ProofOptions()

    def check():
        return options.check_probes(proof, probes, computed, engine="x", step=1, dtype=served)

    if agrees:
        assert check().status == "partly"
    else:
        with raises(NotAsPublished, fault="probes"):
            check()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_log_probability_that_is_no_number_agrees_with_none(wrong):
    assert compare_logprobs([[-1.0, -2.0]], [[-1.0, wrong]]) == (float("inf"), float("inf"))


def test_a_small_fault_of_all_tokens_is_seen_in_the_mean():
    probes = make_probes([[1] * 11], [[-1.0] * 10], "float32")
    computed = [[-1.0 - 0.2 * PROBE_TOLERANCES["float32"]] * 10]
    proof = WeightsProof(status="proven", checks=("names",))
    with raises(NotAsPublished, fault="probes"):
        ProofOptions().check_probes(proof, probes, computed, engine="x", step=1, dtype="float32")


def test_an_answer_has_the_weakest_proof_of_its_versions():
    """Invariant 3."""
    record = ProofRecord()
    first, second, third = (StepRef(1, step) for step in range(3))
    record.add(first, "proven")
    record.add(second, "partly")
    assert record.get_weakest([first]) == "proven"
    assert record.get_weakest([first, second]) == "partly"
    assert record.get_weakest([first, third]) == "unproven"
    assert find_weakest([]) == "unproven"
