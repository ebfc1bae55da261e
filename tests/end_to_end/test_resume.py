"""Runs that are started again under their name, after all of their processes were killed."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.pipeline import events_of  # noqa: E402
from tests.support.run_processes import small_run  # noqa: E402
from tests.support.saved_checkpoints import ready_checkpoints  # noqa: E402
from tests.support.sessions import kill_session  # noqa: E402
from tests.support.waits import PATIENCE, child, wait_until  # noqa: E402
from trinity_events.checkpoint_layout import final_name  # noqa: E402
from trinity_events.log import RedisEventLog  # noqa: E402
from trinity_events.server import connect  # noqa: E402
from trinity_schemas import (  # noqa: E402
    RunResumed,
    StepCommitted,
    StepRef,
    TrainerStatusChanged,
)
from trinity_workers.engines.state_files import read_state  # noqa: E402

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def train(tmp_path, policy_folder, run_id, redis_url):
    """Returns the command that trains so many steps on two ranks, with these settings."""
    saving = {"interval": 3, "root": str(tmp_path)}
    file = small_run(tmp_path, policy_folder, trainer={"ranks": 2}, checkpoints=saving)

    def command(steps: int, *settings: str) -> list[str]:
        chosen = [word for one in (f"steps={steps}", *settings) for word in ("--set", one)]
        return [
            sys.executable,
            "-m",
            "trinity_events",
            "train",
            str(file),
            "--run",
            run_id,
            *chosen,
        ]

    return command


async def test_a_run_goes_on_from_its_checkpoint_after_everything_was_killed(
    train, redis_url, run_id, tmp_path
):
    with child(train(100_000), stderr=subprocess.DEVNULL, start_new_session=True) as process:
        wait_until(lambda: ready_checkpoints(redis_url, run_id), patience=3 * PATIENCE)
        kill_session(process.pid)
        process.wait(PATIENCE)
    saved = ready_checkpoints(redis_url, run_id)[-1].step
    steps = saved + 4
    # Fewer ranks than before, and more explorers.
    again = subprocess.run(
        train(steps, "trainer.ranks=1", "explorer.count=2"),
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * PATIENCE,
    )
    assert again.returncode == 0, again.stderr
    said = " ".join(again.stderr.split())
    async with connect(redis_url) as client:
        log = RedisEventLog(client, run_id)
        [resumed] = await events_of(log, RunResumed)
        resumed_from = resumed.event.checkpoint
        assert resumed_from.step >= saved, "the reducer may have announced another before it died"
        assert f"resumes from the checkpoint of step {resumed_from.step}" in said
        committed = [
            one.event.step
            for one in await events_of(log, StepCommitted)
            if one.epoch == 2 and one.event.kind == "weights"
        ]
        running = [one for one in await events_of(log, TrainerStatusChanged) if one.epoch == 2]
    assert resumed_from == StepRef(1, resumed_from.step)
    assert running[0].event.step == resumed_from.step
    # The checkpoint's own weights are published first, and every later step once.
    assert committed == list(range(resumed_from.step, steps + 1))
    assert (tmp_path / run_id / f"global_step_{steps}").is_dir()


@pytest.mark.megatron
def test_a_run_on_megatron_goes_on_at_the_same_layout_after_everything_was_killed(
    train, redis_url, run_id, tmp_path
):
    pytest.importorskip("megatron.core")
    megatron = "trainer.engine=megatron"
    command = train(100_000, megatron)
    with child(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        wait_until(lambda: ready_checkpoints(redis_url, run_id), patience=3 * PATIENCE)
        kill_session(process.pid)
        process.wait(PATIENCE)
    steps = ready_checkpoints(redis_url, run_id)[-1].step + 4
    again = subprocess.run(
        train(steps, megatron),
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * PATIENCE,
    )
    assert again.returncode == 0, again.stderr
    assert "resumes from the checkpoint of step" in " ".join(again.stderr.split())
    training = tmp_path / run_id / final_name(steps) / "actor" / "training"
    for rank in range(2):
        assert {"python", "numpy", "torch"} <= set(
            read_state(training / f"rank_{rank}.pt")["random"]
        )
