"""Explorers that join a run, and die in it, while it goes on."""

import os
import signal

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.rollout_histories import count_raw
from tests.support.run_processes import ended, small_run
from tests.support.waits import PATIENCE, wait_until
from trinity_events.server import connect_sync
from trinity_schemas import RolloutsDispatched, RunKeys, StepTrained

pytestmark = [pytest.mark.processes, pytest.mark.heavy]

SETTINGS = {
    "steps": 1_000_000,
    "explorer": {"groups_per_claim": 4, "wait_for_run": 0},
    "rollouts": {"prompts_per_step": 16, "claim_lease": 6.0},
}


def trained(processes) -> int:
    return sum(isinstance(entry.event, StepTrained) for entry in processes.log())


def claimed(processes) -> dict[str, int]:
    """Return the number of claims of each explorer that has any."""
    key = RunKeys.of(processes.run_id).rollouts
    with connect_sync(processes.redis_url) as client:
        members = [
            member
            for group in client.xinfo_groups(key)
            for member in client.xinfo_consumers(key, group["name"])
        ]
    return {member["name"].decode(): member["pending"] for member in members if member["pending"]}


def killed_in_the_middle(processes, explorers) -> dict[str, int]:
    """Kill two explorers that hold claims; return their names with the number of claims."""
    killed: dict[str, int] = {}

    def kill_one() -> bool:
        for name in claimed(processes):
            if name in killed or name not in explorers:
                continue
            os.kill(explorers[name].pid, signal.SIGSTOP)  # it must not answer meanwhile
            pending = claimed(processes).get(name)
            os.kill(explorers[name].pid, signal.SIGKILL if pending else signal.SIGCONT)
            if pending:
                killed[name] = pending
                return len(killed) == 2
        return False

    wait_until(kill_one)
    return killed


@pytest.mark.nightly("rollouts/test_explorers.py::test_the_claims_of_a_killed_explorer_come_back")
def test_explorers_join_and_die_and_no_step_waits_beyond_a_claim(
    processes, policy_folder, tmp_path
):
    file = small_run(tmp_path, policy_folder, **SETTINGS)
    own = ("--config", str(file))
    reducer = processes.start("reducer")
    trainer = processes.start("train", str(file), "--parts", "trainer")
    explorers = {"explorer-0": processes.start("explorer", "--rank", "0", *own)}
    wait_until(lambda: trained(processes) >= 3, patience=3 * PATIENCE)

    for rank in range(1, 4):
        explorers[f"explorer-{rank}"] = processes.start("explorer", "--rank", str(rank), *own)
    joined: set[str] = set()
    wait_until(
        lambda: joined.update(claimed(processes)) or joined >= explorers.keys(),
        patience=3 * PATIENCE,
    )

    killed = killed_in_the_middle(processes, explorers)
    reached = trained(processes)
    wait_until(lambda: trained(processes) >= reached + 4)
    trainer.terminate()
    assert ended(trainer)[0] == 143

    reissued = [
        rollout
        for envelope in processes.log()
        if isinstance(envelope.event, RolloutsDispatched)
        for rollout in envelope.event.reissued
    ]
    assert len(reissued) >= sum(killed.values())
    assert {rollout.reason for rollout in reissued} == {"lapsed"}, "none waited for its deadline"
    with connect_sync(processes.redis_url) as client:
        entries = client.xrange(RunKeys.of(processes.run_id).events)
    [count] = count_raw(fields[b"e"] for _, fields in entries)
    assert count.wrong == []
    assert count.trained == 16 * count.steps
    assert not count.dropped
    for name, explorer in explorers.items():
        status, _, error = ended(explorer)
        assert status == (-signal.SIGKILL if name in killed else 0), error
    reducer.terminate()
    assert ended(reducer)[0] == 0
