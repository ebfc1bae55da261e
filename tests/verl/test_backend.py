"""veRL's own manager, trainer and rollout workers on Ray, with our backend between them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import anyio
import anyio.to_thread
import pytest

from tests.support.pipeline import events_of
from tests.support.tensors import assert_equal, identical
from tests.verl.conftest import speak_to_verl
from trinity_schemas import StepRef, VersionPartPublished, WeightsApplied

pytestmark = [
    pytest.mark.processes,
    pytest.mark.ray,
    pytest.mark.heavy,
    pytest.mark.timeout(600),  # its own deadlines are shorter, and say what is missing
    pytest.mark.filterwarnings("default"),  # veRL's, Ray's and Megatron's
]

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0
SHORT = 5.0


@pytest.fixture(scope="module")
def fleet(redis_url, weights_url, policy_folder, tmp_path_factory):
    """Two trainers and two rollouts, which take a minute to start; and a reducer of all runs."""
    speak_to_verl()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [
        *(sys.executable, "-m", "trinity_events", "reducer", "--redis-url", redis_url),
        *("--checkpoint-root", str(tmp_path_factory.mktemp("checkpoints"))),
    ]
    reducer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        from tests.verl.actors import Fleet

        ray.init(
            "local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=40
        )
        try:
            yield Fleet(
                policy_folder, redis_url=redis_url, weights_url=weights_url, deadline=DEADLINE
            )
        finally:
            ray.shutdown()
            reducer.kill()
            reducer.wait()


@pytest.fixture
def configured(fleet, redis_url, weights_url, run_id):
    """Has the fleet's processes begin a run, with these options."""
    urls = {"redis_url": redis_url, "weights_url": weights_url, "run_id": run_id}

    def configure(**options):
        fleet.configure(**urls, **{"deadline": DEADLINE, **options})
        for replica in fleet.replicas:
            replica.calls.clear()
        return SimpleNamespace(
            update=lambda step: _in_thread(fleet.manager.update_weights, step),
            given=lambda: fleet.trainer.full_weights()[0],
            fleet=fleet,
        )

    return configure


async def _in_thread(function, *args):
    """As veRL's drivers, which have no event loop, call it."""
    return await anyio.to_thread.run_sync(function, *args)


async def heard(log, count):
    with anyio.fail_after(20):
        while len(applied := await events_of(log, WeightsApplied)) < count:
            await anyio.sleep(0.01)
    return applied


def assert_collected(run):
    given = run.given()
    for collected in run.fleet.rollouts.collected():
        assert_equal(collected, given)
    return given


@pytest.mark.parametrize(
    "transport",
    ["auto", "redis", "ray", "collective"],
)
async def test_every_rollout_has_what_the_trainer_has_after_each_update(configured, log, transport):
    run = configured(transport=transport)
    await run.update(0)
    first = assert_collected(run)
    await _in_thread(run.fleet.trainer.take_step, 1)
    await run.update(1)
    second = assert_collected(run)
    assert not identical(first["model.norm.weight"], second["model.norm.weight"])
    applied = await heard(log, 4)
    served = sorted((envelope.event.version, envelope.producer.rank) for envelope in applied)
    assert served == [(StepRef(1, step), rank) for step in (0, 1) for rank in (0, 1)]
    assert len({envelope.event.digest for envelope in applied}) == 2
    once = ["abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation"]
    assert run.fleet.replicas[0].calls == 2 * once


async def test_deltas_travel_and_make_up_what_the_trainer_has(configured, log):
    run = configured(transport="redis", full_every=3)
    for _ in range(4):  # without a step, as veRL's newest trainer calls it
        await run.update(None)
        assert_collected(run)
    published = [envelope.event for envelope in await events_of(log, VersionPartPublished)]
    assert [event.step for event in published] == [1, 2, 3, 4]
    assert [event.delta is None for event in published] == [True, False, False, True]
    assert published[1].bytes < published[0].bytes / 10, "nothing changed"


async def test_a_step_that_is_sent_again_is_what_the_trainer_has_now(configured, log):
    run = configured()
    await run.update(5)
    await _in_thread(run.fleet.trainer.take_step, 2)
    await run.update(5)
    assert_collected(run)
    assert {envelope.event.version for envelope in await heard(log, 4)} == {
        StepRef(1, 5),
        StepRef(2, 5),
    }


async def test_an_update_that_fails_is_an_error_for_the_driver_and_rollouts_and_the_next_one_works(
    configured, log
):
    run = configured()
    await run.update(1)
    before = run.fleet.rollouts.collected()[0]
    run.fleet.trainer.refuse_third()
    await _in_thread(run.fleet.trainer.take_step, 3)
    with pytest.raises(Exception, match="no room for the third tensor"):
        await run.update(2)
    for error in await _in_thread(_all_heard, run.fleet):
        assert error.startswith("VersionNotAnnounced: the weights of step 2 of run")
        assert "no room for the third tensor" in error and "\n" not in error
    assert_equal(run.fleet.rollouts.collected()[0], before)
    await run.update(2)
    assert_collected(run)
    applied = await heard(log, 4)
    assert [envelope.event.version.step for envelope in applied].count(2) == 2


async def test_a_rank_that_dies_in_the_gathers_is_an_error_for_all_and_another_trainer_goes_on(
    configured, log
):
    run = configured()
    await run.update(1)
    run.fleet.trainer.die_at(1, 3)
    with pytest.raises(Exception, match=r"(?i)could not be gathered|died"):
        await run.update(2)
    for error in await _in_thread(_all_heard, run.fleet):
        assert error.startswith("VersionNotAnnounced: the weights of step 2 of run")
        assert "could not be gathered, because a rank died" in error
    await _in_thread(run.fleet.replace_trainer)
    await run.update(1)
    assert_collected(run)
    applied = await heard(log, 4)
    assert {envelope.event.version for envelope in applied} == {StepRef(1, 1), StepRef(2, 1)}


async def test_a_sender_that_dies_is_an_error_for_rollouts_within_the_deadline(configured):
    run = configured(deadline=SHORT)
    run.fleet.trainer.die_at(0, 3)
    with pytest.raises(Exception, match=r"(?i)died|actor"):
        await run.update(1)
    for error in await _in_thread(_all_heard, run.fleet):
        assert error.startswith("DeadlineExceeded: the weights of step 1 of run")
        assert f"were not announced within {SHORT:g} s" in error and "\n" not in error


def _all_heard(fleet):
    import ray

    return ray.get(fleet.rollouts.heard(DEADLINE + 20))
