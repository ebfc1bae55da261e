"""`sync.transport: cuda-ipc`: weights through the memory of the GPU that all processes share."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray", reason="Ray is not installed")

from tests.support.gpu import needs_gpu
from tests.support.pipeline import events_of
from tests.support.run_processes import small_run
from trinity_schemas import VersionOpened, WeightsApplied

pytestmark = [pytest.mark.heavy, pytest.mark.processes, pytest.mark.ray]

STEPS = 3
NO_GPU = {"RAY_OVERRIDE_RESOURCES": '{"GPU": 0}'}
COUNTED = {"RAY_OVERRIDE_RESOURCES": '{"GPU": 2}'}
"""Two GPUs that Ray counts, and that are none."""


@pytest.fixture
def train(cli, tmp_path, policy_folder):
    """Run `train` with weights through a GPU's memory."""
    file = small_run(tmp_path, policy_folder, trainer={"ranks": None}, steps=STEPS)

    def run(*words, settings=(), **options):
        changed = ("sync.transport=cuda-ipc", *settings)
        changes = [word for setting in changed for word in ("--set", setting)]
        return cli("train", str(file), *changes, *words, **options)

    return run


@needs_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("explorers", [1, 2])
async def test_a_whole_run_sends_its_weights_through_the_gpu_that_its_processes_share(
    train, log, redis_url, tmp_path, explorers
):
    place = ("--run", log.run_id, "--redis-url", redis_url, "--checkpoint-root", str(tmp_path))
    result = train(*place, "--json", settings=(f"explorer.count={explorers}",), timeout=500)
    assert result.returncode == 0, result.stderr
    assert "weights travel by the memory of a GPU" in result.stderr
    summary = json.loads(result.stdout)
    of_log = summary["log"]
    assert summary["transport"] == "cuda-ipc"
    assert (of_log["steps"], of_log["versions_published"]) == (STEPS, STEPS + 1)
    assert (of_log["versions_unaccounted"], of_log["failures"]) == (0, 0)
    opened = [entry.event for entry in await events_of(log, VersionOpened)]
    assert {event.transport for event in opened} == {"cuda-ipc"}
    # Applied means that the weights were compared with the digests of the version.
    applied = [entry.event for entry in await events_of(log, WeightsApplied)]
    assert {event.proof.status for event in applied} == {"proven"}


def test_a_host_without_a_gpu_is_refused_before_the_run_in_one_sentence(train):
    refused = train("--check", env=NO_GPU)
    assert refused.returncode == 1
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the run needs one GPU that 1 rank and 1 explorer share, and ")
    assert "there are 0 GPUs" in line and "another sync.transport than cuda-ipc" in line


def test_all_processes_get_shares_of_one_gpu_where_there_are_two(train):
    checked = train("--check", "--json", env=COUNTED)
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["trainer"]["ranks"] == 1


def test_explorers_of_their_own_are_refused(train):
    refused = train("--parts", "trainer", "--check", env=COUNTED)
    assert refused.returncode == 1
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert "explorers that are started by themselves have no share of the trainer's GPU" in line
