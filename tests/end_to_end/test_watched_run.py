"""A run whose parts hang, die and are killed: what its terminal and the commands say of it."""

import json
import os
import re
import signal
from types import SimpleNamespace

import pytest

from tests.support.run_processes import TrainRun, small_run
from tests.support.waits import wait_until
from trinity_events.diagnostics.stacks import host_processes

pytestmark = [
    pytest.mark.processes,
    pytest.mark.ray,
    pytest.mark.heavy,
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def watched(tmp_path_factory, policy_folder, redis_url, cli):
    """A run that hung at its start, lost an explorer, and was killed with its launcher.

    It has what was said meanwhile, by its terminal and by the commands.
    """
    folder, run_id = tmp_path_factory.mktemp("watched"), f"watched-{os.getpid()}"
    file = small_run(
        folder,
        policy_folder,
        steps=100_000,
        explorer={"count": 2, "groups_per_claim": 1},
        rollouts={"claim_lease": 5.0},
        checkpoints={"root": str(folder)},
    )
    place = ("--run", run_id, "--redis-url", redis_url)
    run = TrainRun(file, *place)

    def ask(command):
        return json.loads(cli(command, run_id, "--redis-url", redis_url, "--json").stdout)

    def lines(pattern):
        return [line for line in run.stderr_lines if re.search(pattern, line)]

    def process(name):
        at = host_processes(run_id).get(name)
        return at.pid if at is not None and at.condition != "ended" else None

    try:
        seen = SimpleNamespace(run_id=run_id)
        seen.rank = run.until(lambda: process("actor-0"))
        os.kill(seen.rank, signal.SIGSTOP)
        seen.hang = run.until(lambda: lines("first cause: actor-0"))
        seen.explained_hang = ask("explain")
        os.kill(seen.rank, signal.SIGCONT)
        run.until(lambda: lines(r"step \d+/100000"))

        seen.victim = run.until(lambda: process("explorer-1"))
        os.kill(seen.victim, signal.SIGKILL)
        seen.death = run.until(lambda: lines("explorer-1 .* died"))
        seen.after_death = ask("status")["trainer_step"]
        seen.successor = run.until(lambda: process("explorer-1"))
        run.until(lambda: ask("status")["trainer_step"] > seen.after_death + 3)
        os.kill(seen.successor, signal.SIGSTOP)
        arguments = ("status", run_id, "--redis-url", redis_url)
        seen.suspended = cli(*arguments, env={"COLUMNS": "300"}).stdout
        os.kill(seen.successor, signal.SIGCONT)

        seen.launcher = run.process.pid
        seen.second_start = cli("train", str(file), *place)
        run.process.kill()
        wait_until(lambda: process("launcher-0") is None)
        wait_until(lambda: "was killed" in ask("explain")["explanation"])
        seen.explained_death = ask("explain")["explanation"]
        yield seen
    finally:
        run.close()


def test_a_rank_that_hangs_at_the_start_is_named_by_terminal_and_explain(watched):
    assert f"process {watched.rank} of this host) is stopped" in watched.hang[0]
    cause = watched.explained_hang["causes"][0]
    assert (cause["process"], cause["pid"]) == ("actor-0", watched.rank)
    assert watched.explained_hang["epoch"] == 1


def test_an_explorer_that_is_killed_is_started_again_and_the_run_continues(watched):
    assert f"process {watched.victim} on" in watched.death[0]
    assert "killed by SIGKILL" in watched.death[0]
    assert "restart 1 of 3" in watched.death[0]
    assert watched.successor != watched.victim


def test_an_explorer_that_is_stopped_is_not_shown_as_running(watched):
    rows = [line.split() for line in watched.suspended.splitlines()]
    [status] = {row[1] for row in rows if row[:1] == ["explorer-1"] and not row[1].isdigit()}
    assert status == "suspended"


def test_a_run_whose_processes_live_is_not_started_a_second_time(watched):
    second = watched.second_start
    assert second.returncode == 1
    assert f"launcher-0 (process {watched.launcher})" in second.stderr
    assert f"actor-0 (process {watched.rank})" in second.stderr
    assert "--take-over" in second.stderr


def test_explain_says_that_a_run_was_killed_and_which_command_continues_it(watched):
    assert watched.explained_death.startswith(
        f"First cause: The run was killed: launcher-0 (process {watched.launcher} of this host)"
    )
    assert f"small.yaml --run {watched.run_id}" in watched.explained_death
    assert "No reducer leads" not in watched.explained_death
