"""Runs that are started again under their name, after all of their processes were killed."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.crashes.killed_run import ASYNCHRONOUS, MOMENTS, PROMPTS  # noqa: E402
from tests.support.pipeline import events_of  # noqa: E402
from tests.support.run_processes import small_run  # noqa: E402
from tests.support.saved_checkpoints import ready_checkpoints  # noqa: E402
from tests.support.sessions import kill_session  # noqa: E402
from tests.support.style_properties import serving_faults  # noqa: E402
from tests.support.waits import PATIENCE, child, wait_until  # noqa: E402
from tests.support.whole_logs import ledger_faults, whole_log  # noqa: E402
from trinity_events.checkpoints.layout import final_name  # noqa: E402
from trinity_events.log import RedisEventLog  # noqa: E402
from trinity_events.server import connect, connect_sync  # noqa: E402
from trinity_schemas import (  # noqa: E402
    RunKeys,
    RunResumed,
    StepCommitted,
    StepRef,
    TrainerStatusChanged,
)
from trinity_workers.config.files import read_config  # noqa: E402
from trinity_workers.config.train_config import TrainConfig  # noqa: E402
from trinity_workers.engines.state_files import read_state  # noqa: E402

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(1200)]


EXAMPLES = Path(__file__).parents[2] / "examples" / "train"


@pytest.fixture
def train(run_id, redis_url):
    """Returns the command that trains so many steps as a file says, with these settings."""

    def command(file: Path, steps: int, *settings: str) -> list[str]:
        chosen = [word for setting in (f"steps={steps}", *settings) for word in ("--set", setting)]
        return [
            *(sys.executable, "-m", "trinity_events", "train", str(file), "--run", run_id),
            *("--redis-url", redis_url, "--json", *chosen),
        ]

    return command


@pytest.fixture
def kill(redis_url, run_id):
    """Starts a command, and kills all of it after a checkpoint; returns the newest one's step."""

    def run(command: list[str], *, entries: int = 0) -> int:
        log = RunKeys.of(run_id).events
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with (
            child(command, start_new_session=True, **quiet) as process,
            connect_sync(redis_url) as client,
        ):
            wait_until(lambda: ready_checkpoints(redis_url, run_id), patience=3 * PATIENCE)
            enough = client.xlen(log) + entries
            wait_until(lambda: client.xlen(log) >= enough, patience=3 * PATIENCE)
            kill_session(process.pid)
            process.wait(PATIENCE)
        return ready_checkpoints(redis_url, run_id)[-1].step

    return run


def finished(command: list[str]) -> str:
    """Run a command to its end; return what it printed for people, in one line."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=3 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"] == "finished"
    return " ".join(done.stderr.split())


@pytest.mark.nightly(
    "crashes/test_killed_runs.py::test_a_run_of_adapters_that_was_killed_ends_with_the_bits_of_an_undisturbed_one"
)
async def test_a_run_goes_on_from_its_checkpoint_after_everything_was_killed(
    train, kill, redis_url, run_id, tmp_path, policy_folder
):
    """No prompt is lost, and none trained twice, although versions are asynchronous."""
    moment = random.SystemRandom().randrange(MOMENTS)
    print(f"killed {moment} entries after a checkpoint")  # of a failure
    rollouts = {"prompts_per_step": PROMPTS, "claim_lease": 5.0} | ASYNCHRONOUS["rollouts"]
    saving = {"interval": 3, "root": str(tmp_path)}
    sections = ASYNCHRONOUS | {"rollouts": rollouts, "checkpoints": saving}
    file = small_run(tmp_path, policy_folder, **sections)
    saved = kill(train(file, 100_000, "trainer.ranks=2"), entries=moment)
    steps = saved + 4
    # Fewer ranks than before, and more explorers.
    output = finished(train(file, steps, "trainer.ranks=1", "explorer.count=2"))
    async with connect(redis_url) as client:
        log = RedisEventLog(client, run_id)
        [resumed] = await events_of(log, RunResumed)
        resumed_from = resumed.event.checkpoint
        assert resumed_from.step >= saved, "the reducer may have announced another before it died"
        assert f"resumes from the checkpoint of step {resumed_from.step}" in output
        committed = [
            entry.event.step
            for entry in await events_of(log, StepCommitted)
            if entry.epoch == 2 and entry.event.kind == "weights"
        ]
        running = [
            entry for entry in await events_of(log, TrainerStatusChanged) if entry.epoch == 2
        ]
    assert resumed_from == StepRef(1, resumed_from.step)
    assert running[0].event.step == resumed_from.step
    # The checkpoint's own weights are published first, and every later step once.
    assert committed == list(range(resumed_from.step, steps + 1))
    assert (tmp_path / run_id / f"global_step_{steps}").is_dir()
    assert ledger_faults(redis_url, run_id, steps=steps, prompts=PROMPTS) == []
    assert serving_faults(whole_log(redis_url, run_id)) == []


@pytest.mark.nightly(
    "crashes/test_killed_runs.py::test_a_run_of_adapters_that_was_killed_ends_with_the_bits_of_an_undisturbed_one"
)
@pytest.mark.megatron
async def test_the_example_on_megatron_goes_on_at_its_layout_after_everything_was_killed(
    train, kill, redis_url, run_id, tmp_path, policy_folder
):
    """It is saved at its end as at a step, and its configuration is in log and folder."""
    pytest.importorskip("megatron.core")
    settings = (
        *("rollouts.prompts_per_step=2", "rollouts.samples_per_prompt=2", "evaluation.sets={}"),
        *("checkpoints.interval=2", f"checkpoints.root={tmp_path}", f"model.path={policy_folder}"),
    )
    file = EXAMPLES / "megatron.yaml"
    steps = kill(train(file, 100_000, *settings)) + 3
    output = finished(train(file, steps, *settings))
    assert "resumes from the checkpoint of step" in output
    folder = tmp_path / run_id
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(steps)
    actor = folder / final_name(steps) / "actor"
    assert {path.name for path in actor.iterdir()} == {"model", "training", "huggingface"}
    assert (actor / "model" / "metadata.json").is_file()
    for rank in range(2):
        state = read_state(actor / "training" / f"rank_{rank}.pt")
        assert {"python", "numpy", "torch"} <= set(state["random"])
    async with connect(redis_url) as client:
        [resumed] = await events_of(RedisEventLog(client, run_id), RunResumed)
    logged = TrainConfig.from_text(resumed.event.config)
    assert logged == read_config(folder / "config.yaml").checked()
    assert (logged.steps, logged.trainer.engine) == (steps, "megatron")


@pytest.mark.nightly(
    "crashes/test_killed_runs.py::test_a_run_of_adapters_that_was_killed_ends_with_the_bits_of_an_undisturbed_one"
)
def test_ranks_that_share_layers_go_on_after_everything_was_killed(
    train, kill, redis_url, run_id, tmp_path, policy_folder
):
    """At the layout of the checkpoint, and then as replicas with whole layers."""
    file = small_run(
        tmp_path,
        policy_folder,
        trainer={"ranks": 2, "tensor_parallel": 2, "fused_loss": True},
        rollouts={"prompts_per_step": PROMPTS},
        checkpoints={"interval": 2, "root": str(tmp_path)},
    )
    steps = kill(train(file, 100_000)) + 3
    assert "resumes from the checkpoint of step" in finished(train(file, steps))
    finished(train(file, steps + 1, "trainer.tensor_parallel=1"))
    assert ledger_faults(redis_url, run_id, steps=steps + 1, prompts=PROMPTS) == []
    assert serving_faults(whole_log(redis_url, run_id)) == []
