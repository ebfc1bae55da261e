"""A run whose trainer loses the link to its server for a while."""

import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.faulty_proxy import Proxy
from tests.support.run_processes import ended, small_run
from tests.support.waits import PATIENCE, wait_until
from trinity_schemas import LeaseExpired, RunOpened, StepTrained, TrainerStatusChanged

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.server]

CUT = 35.0
"""Seconds of the outage: more than the 30 s for which a publisher waits without a configuration."""


def steps_trained(processes) -> int:
    return sum(isinstance(entry.event, StepTrained) for entry in processes.log())


def find_last(processes, kind) -> int:
    """Return the index of the last event of a kind; it is an error if there is none."""
    return max(i for i, entry in enumerate(processes.log()) if isinstance(entry.event, kind))


@pytest.mark.nightly(
    "workers/trainer/test_cut_links.py::"
    "test_a_trainer_outlasts_a_link_that_is_cut_for_less_than_its_timeout"
)
@pytest.mark.timeout(300)
def test_a_run_goes_on_after_its_trainers_link_was_cut_for_35_seconds(
    processes, policy_folder, tmp_path
):
    file = small_run(tmp_path, policy_folder, steps=1_000_000)
    # Chunks travel by the link too.
    processes.env["TRINITY_WEIGHTS_REDIS_URL"] = processes.redis_url
    with Proxy(processes.redis_url) as link:
        processes.urls["train"] = link.url
        processes.start("reducer")
        trainer = processes.start("train", str(file), "--parts", "trainer")
        explorer = processes.start("explorer", "--config", str(file))
        wait_until(lambda: steps_trained(processes) >= 2, patience=3 * PATIENCE)
        link.swallow()
        time.sleep(CUT)  # the outage
        reached = steps_trained(processes)
        assert trainer.poll() is None
        link.heal()
        wait_until(lambda: steps_trained(processes) >= reached + 3, patience=3 * PATIENCE)
        assert explorer.poll() is None
        # Its lease expired in the outage, and it has said that it is back.
        silent_at = find_last(processes, LeaseExpired)
        wait_until(lambda: find_last(processes, TrainerStatusChanged) > silent_at)
        trainer.terminate()
        assert ended(trainer)[0] == 143
    opened = [entry for entry in processes.log() if isinstance(entry.event, RunOpened)]
    assert len(opened) == 1
    assert processes.closed() == ["interrupted"]
