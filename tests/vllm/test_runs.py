"""Whole runs of `train` with vLLM: rows of the matrix, and cores that are killed."""

import os
import signal
import time

import pytest

pytest.importorskip("torch")

from tests.matrix.combinations import combinations
from tests.matrix.matrix_run import DEADLINE, ENGINE_SETTINGS, REWARD, perform, started
from tests.support.run_processes import small_run
from tests.support.sessions import find_process, session_members
from tests.support.vllm_policies import create_vllm_policy
from tests.support.waits import wait_until
from tests.support.whole_logs import ledger_faults, whole_log
from trinity_schemas import StepTrained, WeightsApplied

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(3 * DEADLINE)]

ROWS = {
    combination.name: combination
    for combination in combinations()
    if combination.rollouts == "vllm"
}
SECONDS = 20.0
"""Within which a killed core ends its explorer's process or its actor, on a loaded machine too."""


@pytest.fixture(scope="module")
def vllm_folder(tmp_path_factory):
    """Policy whose heads two ranks of Megatron share."""
    return create_vllm_policy(tmp_path_factory.mktemp("vllm-policy"), kv_heads=2)


@pytest.mark.parametrize(
    "name",
    [
        "vllm-fsdp-memory-fully_async",
        pytest.param("vllm-megatron-checkpoint-trainer_driven", marks=pytest.mark.nightly),
    ],
)
def test_a_row_of_the_matrix_is_as_it_must_be(name, tmp_path, vllm_folder, redis_url):
    assert perform(ROWS[name], tmp_path / "run", vllm_folder, redis_url).faults == []


@pytest.mark.nightly(
    "vllm/test_engine.py::test_a_killed_core_ends_calls_within_seconds_and_leaves_no_process"
)
def test_killed_cores_end_or_restart_their_explorers_within_seconds(
    tmp_path, vllm_folder, redis_url
):
    run_id, steps, prompts = f"killed-{os.getpid()}", 60, 4
    file = small_run(
        tmp_path,
        vllm_folder,
        steps=steps,
        explorer={"engine": "vllm", "groups_per_claim": 1, **ENGINE_SETTINGS["vllm"]},
        rollouts={"prompts_per_step": prompts, "claim_lease": 10.0, "request_deadline": DEADLINE},
        sync={"style": "fully_async", "timeout": DEADLINE},
        rewards={"function": "./reward.py:reward", "deadline": DEADLINE},
    )
    hold = tmp_path / "hold"
    hold.touch()
    (tmp_path / "reward.py").write_text(REWARD)
    where = ["--run", run_id, "--redis-url", redis_url, "--checkpoint-root", str(tmp_path)]
    outputs = tmp_path / "train.txt", tmp_path / "explorer.txt"

    def events_of(kind, rank=0):
        log = whole_log(redis_url, run_id)
        return [each for each in log if isinstance(each.event, kind) and each.producer.rank == rank]

    with started("train", str(file), *where, output=outputs[0]) as training:
        wait_until(lambda: events_of(WeightsApplied), patience=DEADLINE)
        own = ("--rank", "1", "--config", str(file))
        with started("explorer", *own, *where, output=outputs[1]) as explorer:
            wait_until(lambda: events_of(WeightsApplied, 1), patience=DEADLINE)
            cores = find_core(training.pid), find_core(explorer.pid)
            hold.unlink()
            wait_until(lambda: events_of(StepTrained), patience=DEADLINE)
            assert kill(cores[1], lambda: explorer.poll() is not None) < SECONDS
            assert explorer.returncode == 1
            assert "has ended" in outputs[1].read_text()
            wait_until(lambda: not session_members(explorer.pid), patience=SECONDS)
        restarted = "it is started again (restart 1 of"
        assert kill(cores[0], lambda: restarted in outputs[0].read_text()) < SECONDS
        wait_until(lambda: training.poll() is not None, patience=DEADLINE)
        assert training.returncode == 0, outputs[0].read_text()
        wait_until(lambda: not session_members(training.pid), patience=SECONDS)
    assert len({each.producer.incarnation for each in events_of(WeightsApplied)}) == 2
    assert len(events_of(StepTrained)) == steps
    assert ledger_faults(redis_url, run_id, steps=steps, prompts=prompts) == []


def find_core(session):
    """Return the process of vLLM's core in a session.

    It keeps the command line of a spawned process where setproctitle, which says nothing then,
    cannot change it: the first variable of its environment was set again.
    """
    return find_process(session, b"EngineCore", b"spawn_main")


def kill(process, ended):
    """Kill a process, and return the seconds until a condition holds."""
    os.kill(process, signal.SIGKILL)
    killed_at = time.monotonic()
    wait_until(ended, patience=2 * SECONDS)
    return time.monotonic() - killed_at
