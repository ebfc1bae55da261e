"""Short form of ``make crash`` on policy; that of asynchronous runs is in test_resume.py."""

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.crashes.killed_run import (
    ADAPTERS,
    ON_POLICY,
    KilledRun,
    differences,
    killed_at_random,
    warm_model,
)

pytestmark = [pytest.mark.processes, pytest.mark.heavy]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return warm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def seed():
    drawn = secrets.randbelow(10**6)
    print(f"seed {drawn}")  # of a failure
    return drawn


@pytest.mark.nightly(
    "crashes/test_killed_runs.py::test_a_run_of_adapters_that_was_killed_ends_with_the_bits_of_an_undisturbed_one"
)
@pytest.mark.timeout(1200)
def test_a_run_that_was_killed_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path, model, redis_url, run_id, seed
):
    killed = KilledRun(tmp_path, model, redis_url, f"{run_id}-a", ON_POLICY, ranks=2)
    steps = killed_at_random(killed, kills=1, seed=seed)
    undisturbed = KilledRun(tmp_path, model, redis_url, f"{run_id}-b", ON_POLICY, ranks=2)
    undisturbed.finish(steps)
    weights = killed.weights(steps)
    assert weights, "the checkpoint of the last step holds tensors"
    assert differences(weights, undisturbed.weights(steps)) == []
    assert killed.faults(steps) == undisturbed.faults(steps) == []
    # Also what was trained after a resume: the record has the steps that count.
    assert f"equal to the bit to {killed.run_id} at step {steps}" in killed.retrain()


@pytest.mark.timeout(1200)
def test_a_run_of_adapters_that_was_killed_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path, model, redis_url, run_id
):
    pytest.importorskip("peft")
    killed = KilledRun(tmp_path, model, redis_url, f"{run_id}-a", ADAPTERS)
    steps = killed.kill_with_checkpoint() + 4
    undisturbed = KilledRun(tmp_path, model, redis_url, f"{run_id}-b", ADAPTERS)
    with ThreadPoolExecutor() as beside:  # they wait more than they compute
        for ended in [beside.submit(run.finish, steps) for run in (killed, undisturbed)]:
            ended.result()
    weights = killed.weights(steps)
    assert any("lora_B" in name for name in weights)
    assert not any("embed_tokens" in name for name in weights), "nothing of the base"
    assert differences(weights, undisturbed.weights(steps)) == []
    assert killed.faults(steps) == undisturbed.faults(steps) == []
