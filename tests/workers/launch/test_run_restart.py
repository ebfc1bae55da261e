"""A run that is started again: what it goes on from, and what it refuses to begin over."""

import subprocess
import sys

import msgspec
import pytest
from msgspec import structs

from tests.support.errors import raises
from tests.support.event_histories import committed, finished, registration
from tests.support.pipeline import events_of, reducer_task
from tests.support.waits import PATIENCE, child
from trinity_events.checkpoints.layout import VERIFIED
from trinity_events.checkpoints.verification import CheckpointDamaged
from trinity_events.core import Evidence
from trinity_events.errors import DeadlineExceeded
from trinity_events.log import AsyncPublisher, new_producer, open_run
from trinity_events.replay import current_state
from trinity_events.server import connect
from trinity_events.views.status import format_next_step
from trinity_schemas import RunOpened, StepRef, TrainerStatusChanged
from trinity_workers.config.errors import CommandRefused
from trinity_workers.config.sections.checkpoints import CheckpointsConfig
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.launch.lifecycle import closing
from trinity_workers.launch.next_command import next_command
from trinity_workers.launch.resume import (
    CheckpointMissing,
    NoSuchCheckpoint,
    NothingToTrain,
    OtherCheckpoints,
    earlier_run,
    held_checkpoint,
)
from trinity_workers.launch.resume_command import resume_command
from trinity_workers.trainer.state import UnusableTrainerState


def command(name, run_id, redis_url, root, *more):
    return [
        *(name, "--run", run_id, "--redis-url", redis_url, "--weights-redis-url", redis_url),
        *("--checkpoint-root", str(root), "--steps", "2", *more),
    ]


async def saved(publisher, step, kind="checkpoint"):
    await publisher.publish(finished(step, kind=kind, path=f".staging/epoch_1_step_{step}_a/m"))
    await publisher.publish(committed(step, kind, registration(kind)))


async def test_files_that_are_no_whole_checkpoint_are_not_begun_over_unasked(
    cli, publisher, log, redis_url, run_id, tmp_path
):
    await saved(publisher, 300, "state_dict")
    result = cli(*command("trainer", run_id, redis_url, tmp_path), timeout=PATIENCE)
    assert result.returncode == 1
    assert f"error: run {run_id} has ready files of step 300 that are no whole" in result.stderr
    assert str(tmp_path / run_id) in result.stderr
    assert "--fresh" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(await events_of(log, RunOpened)) == 1, "no epoch is taken"


@pytest.mark.parametrize("name", ["demo", "trainer"])
async def test_a_run_that_has_all_of_its_steps_says_how_it_is_extended(
    cli, publisher, log, redis_url, run_id, tmp_path, name
):
    await saved(publisher, 2)
    result = cli(*command(name, run_id, redis_url, tmp_path), timeout=PATIENCE)
    assert result.returncode == 1
    assert f"error: run {run_id} has trained 2 steps, and 2 are asked for" in result.stderr
    assert "ask for more steps to extend it" in result.stderr
    assert len(await events_of(log, RunOpened)) == 1, "no epoch is taken"


async def test_an_earlier_run_is_gone_on_from_only_where_its_lineage_stands(
    publisher, log, redis_url, run_id, tmp_path
):
    assert (await earlier_run(log, tmp_path, 9, fresh=False)).checkpoint is None
    await saved(publisher, 5)
    earlier = await earlier_run(log, tmp_path, 9, fresh=False)
    assert earlier.checkpoint == StepRef(1, 5)
    assert "resumes from the checkpoint of step 5" in earlier.notice(run_id, 2, earlier.checkpoint)
    assert (await earlier_run(log, tmp_path, 9, fresh=True)).checkpoint is None
    async with connect(redis_url) as client:
        assert await open_run(client, run_id, resume_from=earlier.checkpoint) == 2
        assert (await earlier_run(log, tmp_path, 9, fresh=False)).checkpoint == StepRef(2, 5)
        assert await open_run(client, run_id) == 3  # with --fresh
    with raises(OtherCheckpoints, run_id=run_id, step=5, folder=tmp_path, fault="earlier"):
        await earlier_run(log, tmp_path, 9, fresh=False)


def put_checkpoint(folder, step, epoch=1):
    made = folder / f"global_step_{step}"
    made.mkdir(parents=True)
    evidence = Evidence(epoch=epoch, step=step, kinds=("checkpoint",))
    (made / VERIFIED).write_bytes(msgspec.json.encode(evidence))
    (made / "model.pt").touch()


async def test_an_older_checkpoint_is_resumed_from_by_its_step(publisher, log, run_id, tmp_path):
    for step in (2, 4, 6):
        await saved(publisher, step)
    for step in (2, 4):
        put_checkpoint(tmp_path, step)
    earlier = await earlier_run(log, tmp_path, 9, fresh=False, from_step=2)
    assert earlier.checkpoint == StepRef(1, 2)
    with pytest.raises(NoSuchCheckpoint) as refusal:  # in the log alone
        await earlier_run(log, tmp_path, 9, fresh=False, from_step=6)
    assert (refusal.value.run_id, refusal.value.step, refusal.value.steps) == (run_id, 6, (2, 4))
    put_checkpoint(tmp_path, 3)
    with pytest.raises(NoSuchCheckpoint):  # on the disk alone
        await earlier_run(log, tmp_path, 9, fresh=False, from_step=3)


async def test_an_older_checkpoint_is_resumed_from_by_the_epoch_that_wrote_it(
    publisher, log, client, run_id, tmp_path
):
    for step in (2, 4):
        await saved(publisher, step)
        put_checkpoint(tmp_path, step)
    assert await open_run(client, run_id, resume_from=StepRef(1, 4)) == 2
    second = AsyncPublisher(log, 2, new_producer("trainer"))
    await saved(second, 6)
    put_checkpoint(tmp_path, 6, epoch=2)
    by_step = {2: StepRef(1, 2), 4: StepRef(1, 4), 6: StepRef(2, 6)}
    for step, checkpoint in by_step.items():
        earlier = await earlier_run(log, tmp_path, 9, fresh=False, from_step=step)
        assert earlier.checkpoint == checkpoint


async def test_a_checkpoint_that_is_gone_names_the_newest_older_one(
    publisher, make_config, run_id, tmp_path
):
    for step in (2, 4, 6):
        await saved(publisher, step)
    for step in (2, 4):
        put_checkpoint(tmp_path / run_id, step)
    config = structs.replace(make_config(), resumed_step=6)
    with pytest.raises(CheckpointMissing) as refusal:
        async with held_checkpoint(config, tmp_path):
            pass
    assert (refusal.value.run_id, refusal.value.step, refusal.value.older) == (run_id, 6, 4)


def test_a_step_to_resume_from_and_a_fresh_start_exclude_each_other(
    cli, redis_url, run_id, tmp_path
):
    options = ("--fresh", "--from-step", "2")
    refused = cli(*command("trainer", run_id, redis_url, tmp_path, *options), timeout=PATIENCE)
    assert refused.returncode == 1
    assert "give one of them" in refused.stderr


def test_the_command_that_goes_on_resumes_from_the_newest_checkpoint(run_id):
    for words in (["--from-step", "2"], ["--from-step=2"]):
        typed = resume_command(["train", "run.yaml", *words, "--run", run_id], run_id)
        assert typed.endswith(f"trinity-events train run.yaml --run {run_id}")


def test_a_command_that_would_fail_again_is_not_what_goes_on(run_id, tmp_path):
    command = f"trinity-events train run.yaml --run {run_id}"
    for error in (None, DeadlineExceeded("no answer came", 1.0), ValueError("a defect")):
        assert next_command(command, error) == command
    for older in (
        CheckpointMissing(run_id, 6, "it is gone", 4),
        CheckpointDamaged(tmp_path / "model.pt", "was changed", 6, 4),
    ):
        assert next_command(command, older) == f"{command} --from-step 4"
    for lasting in (
        CheckpointMissing(run_id, 6, "it is gone"),
        CheckpointDamaged(tmp_path / "model.pt", "was changed", 6),
        UnusableTrainerState(tmp_path, "it is damaged"),
        CommandRefused("run"),
    ):
        assert next_command(command, lasting) is None


async def test_a_checkpoint_that_is_not_here_is_not_resumed_from(
    publisher, make_config, run_id, tmp_path
):
    await saved(publisher, 5)
    config = structs.replace(make_config(), resumed_step=5)
    with raises(CheckpointMissing, run_id=run_id, step=5):
        async with held_checkpoint(config, tmp_path):
            pass


def test_checkpoints_whose_log_is_gone_are_not_begun_over_either(cli, redis_url, run_id, tmp_path):
    (tmp_path / run_id / "global_step_40").mkdir(parents=True)
    result = cli(*command("trainer", run_id, redis_url, tmp_path), timeout=PATIENCE)
    assert result.returncode == 1
    assert "has a checkpoint of step 40 that its log does not know" in result.stderr
    assert "--fresh" in result.stderr


@pytest.mark.processes
async def test_what_is_begun_anew_all_the_same_says_how_far_the_run_had_come(
    publisher, log, redis_url, run_id, tmp_path
):
    await saved(publisher, 40)
    await publisher.publish(TrainerStatusChanged(status="running", step=57))
    with child(
        [
            *(sys.executable, "-m", "trinity_events"),
            *command("trainer", run_id, redis_url, tmp_path, "--fresh"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "starts at step 1" in " ".join(lines):
                break
        output = " ".join("".join(lines).split())
        assert f"warning: run {run_id} begins anew: epoch 1 had reached step 57" in output
        assert "epoch 2 starts at step 1" in output
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert len(await events_of(log, RunOpened)) == 2


def test_the_last_step_is_saved_whatever_the_interval():
    settings = TrainConfig(steps=250)
    assert [step for step in range(1, 251) if settings.is_save_step(step)] == [100, 200, 250]
    assert TrainConfig(steps=3).is_save_step(3)
    assert not TrainConfig(steps=3, checkpoints=CheckpointsConfig(interval=0)).is_save_step(3)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (NothingToTrain("run", 5, 5), "The same command would fail again"),
        (DeadlineExceeded("no answer came", 1.0), "Continue it with: trinity-events train a.yaml"),
    ],
    ids=["lasting", "passing"],
)
async def test_the_log_says_which_command_continues_a_run_and_none_that_would_fail_again(
    client, log, redis_url, run_id, make_config, error, sentence
):
    async with reducer_task(redis_url, run_id):
        with pytest.raises(type(error)):
            async with closing(client, make_config(), "trinity-events train a.yaml"):
                raise error
    state = await current_state(log)
    assert state.closed == "failed"
    assert sentence in format_next_step(state)
    assert ("Continue it with" in format_next_step(state)) == (state.command is not None)
