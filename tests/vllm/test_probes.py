"""Probes in vLLM: what they see, and that no token leaves before their verdict."""

from contextlib import contextmanager

import anyio
import pytest

from tests.support.errors import raises
from tests.support.pipeline import events_of, reports_accepted
from tests.support.rollout_engines import requests_for
from tests.vllm.test_planted_faults import EMBEDDING, GATE_AND_UP, NORMS, O_PROJ, QUERIES
from trinity_events.errors import NotAsPublished, ProofTooWeak
from trinity_schemas import StepRef, VersionRefused, WeightsApplied
from trinity_workers.rollout_engines import NotServing
from trinity_workers.rollout_engines.proof import ProofOptions

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.processes, pytest.mark.heavy]

PROBES = ProofOptions(checks="probes", min_status="partly")


@contextmanager
def checking(engine, proof, pause_mode="wait"):
    """Let the session's engine make other checks, in the block."""
    before = engine._proof, engine.pause_mode
    engine._proof, engine.pause_mode = proof, pause_mode
    try:
        yield
    finally:
        engine._proof, engine.pause_mode = before


async def last_events(run, kind):
    run.engine._synchronizer.flush()
    await reports_accepted(run.log)
    return [entry.event for entry in await events_of(run.log, kind)][-1]


async def test_probes_agree_and_prove_a_version_partly(vllm_run):
    with checking(vllm_run.engine, PROBES):
        await vllm_run.engine.install(await vllm_run.publish(with_probes=True))
    proof = (await last_events(vllm_run, WeightsApplied)).proof
    assert (proof.status, proof.checks, proof.probes) == ("partly", ("names", "probes"), 4)
    assert 0 < proof.difference < 1e-5
    [generation] = await vllm_run.engine.generate(requests_for([0], samples=1))
    assert generation.proof == "partly"


async def test_all_checks_prove_a_version(vllm_run):
    with checking(vllm_run.engine, ProofOptions(checks="all", min_status="proven")):
        await vllm_run.engine.install(await vllm_run.publish(with_probes=True))
    proof = (await last_events(vllm_run, WeightsApplied)).proof
    assert (proof.status, proof.checks) == ("proven", ("names", "served", "probes"))
    [generation] = await vllm_run.engine.generate(requests_for([0], samples=1))
    assert generation.proof == "proven"


@pytest.mark.parametrize(
    ("fault", "is_seen"),
    [
        ("swap:" + ",".join(QUERIES), True),
        ("swap:" + ",".join(GATE_AND_UP), True),
        ("swap:" + ",".join(NORMS), True),
        (f"flip:{O_PROJ}:sign", True),
        (f"flip:{O_PROJ}:exponent", True),
        (f"flip:{O_PROJ}:mantissa", True),
        (f"flip:{O_PROJ}:last", False),
        (f"flip:{EMBEDDING}:sign", True),
        ("stale-head", True),
    ],
)
async def test_probes_see_planted_faults_but_for_a_last_bit(vllm_run, fault, is_seen):
    engine = vllm_run.engine
    with checking(engine, PROBES):
        await vllm_run.plant(fault)
        announced = await vllm_run.publish(with_probes=True)
        try:
            if not is_seen:
                await engine.install(announced)
                return
            with raises(
                NotAsPublished, fault="probes", step=announced.step, engine="vLLM"
            ) as error:
                await engine.install(announced)
        finally:
            await vllm_run.plant(None)
        assert engine.serves is None
        with pytest.raises(NotServing):
            await engine.generate(requests_for([0], samples=1))
        refused = await last_events(vllm_run, VersionRefused)
        assert (refused.version.step, refused.reason) == (announced.step, str(error.value))
        await engine.install(await vllm_run.publish(with_probes=True))
        assert (await engine.generate(requests_for([0], samples=1)))[0].proof == "partly"


@pytest.mark.parametrize("is_good", [True, False])
async def test_turns_under_way_wait_for_the_verdict_on_a_version(vllm_run, is_good):
    engine = vllm_run.engine
    await vllm_run.install_next()
    before, requests = engine.serves, requests_for(range(16), samples=4, tokens=40)
    outcomes = []
    with checking(engine, PROBES, pause_mode="keep"):
        if not is_good:
            await vllm_run.plant("stale-head")
        announced = await vllm_run.publish(with_probes=True)
        version = StepRef(announced.epoch, announced.step)
        async with anyio.create_task_group() as tasks:

            async def generate():
                while engine.serves == before:
                    try:
                        outcomes.extend(await engine.generate(requests))
                    except NotServing as error:
                        outcomes.append(error)
                        return

            tasks.start_soon(generate)
            while not engine._calls:
                await anyio.sleep(0)
            try:
                await engine.install(announced)
            except NotAsPublished:
                assert not is_good
        await vllm_run.plant(None)
    generations = [outcome for outcome in outcomes if not isinstance(outcome, NotServing)]
    versions = {each for generation in generations for each, _ in generation.versions}
    assert versions <= ({before, version} if is_good else {before})
    assert bool(len(outcomes) - len(generations)) == (not is_good)
    for generation in generations:
        mixed = version in {each for each, _ in generation.versions}
        assert generation.proof == ("partly" if mixed else "proven")
    await vllm_run.install_next()


async def test_a_version_without_probes_is_refused_where_they_are_asked_for(vllm_run):
    announced = await vllm_run.publish()
    with (
        checking(vllm_run.engine, PROBES),
        raises(ProofTooWeak, fault="no probes", step=announced.step, status="unproven"),
    ):
        await vllm_run.engine.install(announced)
    assert vllm_run.engine.serves is None
    await vllm_run.install_next()


async def test_layers_are_looked_into_in_turn(vllm_run):
    names, compared = {name for name, _ in vllm_run.model.named_parameters()}, []
    with checking(vllm_run.engine, ProofOptions(layers=2, min_status="partly")):
        for _ in range(2):
            await vllm_run.install_next()
            proof = (await last_events(vllm_run, WeightsApplied)).proof
            assert proof.status == "partly"
            compared.append(names - set(proof.unproven))
    assert set.union(*compared) == names, "of four layers, two turns compare all"
    assert compared[0].isdisjoint(compared[1])
    await vllm_run.install_next()
