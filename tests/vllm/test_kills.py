"""Kills of core, explorer, trainer and server amid updates: no token has a wrong label."""

import random
import secrets

import pytest

pytest.importorskip("torch")

from tests.support.vllm_policies import create_vllm_policy
from tests.support.whole_logs import whole_log
from tests.vllm.killed_runs import MODES, VICTIMS, KilledVLLMRun, kill_at_random
from trinity_schemas import ExplorerStatusChanged, StepTrained, WeightsApplied
from trinity_workers.launch.explorer_restarts import MOST_RESTARTS

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.heavy, pytest.mark.timeout(3600)]

KILLS = 10
"""Kills of each of ten runs of the night."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return create_vllm_policy(tmp_path_factory.mktemp("vllm-policy"))


@pytest.fixture
def kill(tmp_path, policy, redis_url, run_id):
    """Kill processes of a run at random; return its log once nothing is wrong with it."""

    def kill(engine, mode, victims, seed):
        print(f"seed {seed}: {engine}, {mode}, {', '.join(victims)}")  # of a failure
        steps = 3 * len(victims) + 4
        run = KilledVLLMRun(
            tmp_path / "run", policy, redis_url, run_id, engine=engine, mode=mode, steps=steps
        )
        with run:
            kill_at_random(run, victims, seed)
        assert run.find_faults() == []
        events = [envelope.event for envelope in whole_log(redis_url, run_id)]
        applied = [event for event in events if isinstance(event, WeightsApplied)]
        assert {event.proof.status for event in applied} == {"proven"}
        return events

    return kill


def test_a_killed_core_explorer_or_trainer_leaves_every_token_its_own_version(kill):
    kill("vllm", "retract", ("core", "explorer", "trainer"), secrets.randbelow(10**6))


def test_a_killed_server_or_its_explorer_leaves_every_token_its_own_version(kill):
    events = kill("vllm-server", "wait", ("explorer", "server"), secrets.randbelow(10**6))
    for step in (event for event in events if isinstance(event, StepTrained)):
        assert step.staleness == {0: 16}
        assert step.metrics["approx_kl"] < 1e-6
    statuses = [event.status for event in events if isinstance(event, ExplorerStatusChanged)]
    assert "require_sync" in statuses


def draw_victims(engine, chosen):
    victims = []
    for _ in range(KILLS):
        victim = chosen.choice(VICTIMS[engine])
        # An explorer that dies four times within a minute ends its run, as it must.
        dies = len(victims) >= MOST_RESTARTS and "trainer" not in victims[-MOST_RESTARTS:]
        victims.append("trainer" if dies else victim)
    return victims


@pytest.mark.nightly(
    "vllm/test_kills.py::test_a_killed_core_explorer_or_trainer_leaves_every_token_its_own_version"
)
@pytest.mark.parametrize("number", range(10))
def test_kills_at_random_leave_every_token_its_own_version(kill, number):
    seed = secrets.randbelow(10**6)
    chosen = random.Random(seed)
    engine = ("vllm", "vllm-server")[number % 2]
    modes = [mode for mode in MODES if (engine, mode) != ("vllm-server", "abort")]
    victims = draw_victims(engine, chosen)
    kill(engine, modes[number // 2 % len(modes)], victims, seed)
