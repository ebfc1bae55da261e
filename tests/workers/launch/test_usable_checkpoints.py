"""A resume takes a checkpoint that is there, whole and as the log has it, or names another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.pipeline import events_of
from tests.support.trained_runs import TrainedRun
from tests.support.waits import PATIENCE, child
from trinity_events.checkpoints.layout import MADE_FROM, TRAINER_STATE, VERIFIED, final_name
from trinity_events.checkpoints.manifest import saved_files, sums_below, write_manifest
from trinity_events.client.checkpoint_lease import hold_checkpoint
from trinity_events.log import AsyncPublisher, new_producer, open_run
from trinity_schemas import RunResumed, StepRef
from trinity_workers.config.files import read_config
from trinity_workers.config.resumable_settings import SettingsNotResumable
from trinity_workers.config.sections.task import TaskConfig
from trinity_workers.config.sections.trainer import TrainerConfig
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.launch.launcher import LaunchOptions, run_job
from trinity_workers.launch.resume import (
    CheckpointMissing,
    CheckpointSource,
    CheckpointUnusable,
    LedgerChanged,
    earlier_run,
    find_usable_checkpoint,
)
from trinity_workers.rollouts.user_task import task_of


@pytest.fixture
def run(publisher, run_id, tmp_path):
    return TrainedRun(publisher, tmp_path / run_id)


@pytest.fixture
def resume(log, redis_url, run_id, tmp_path):
    """Chooses the checkpoint that a start of the run resumes from."""

    async def choose(on_damage="stop", *, from_step=None, **source):
        folder = tmp_path / run_id
        earlier = await earlier_run(log, folder, 99, fresh=False, from_step=from_step)
        places = CheckpointSource(run_id=run_id, root=tmp_path, redis_url=redis_url, **source)
        return await find_usable_checkpoint(places, earlier, on_damage=on_damage)

    return choose


async def test_the_newest_checkpoint_is_taken_with_the_ledger_that_the_log_has(run, resume):
    await run.train(1, 2, 3)
    await run.train(4, saved=False)
    usable = await resume()
    assert (usable.checkpoint, usable.skipped) == (StepRef(1, 3), ())


@pytest.mark.parametrize(
    ("changes", "field", "saved", "logged"),
    [
        ({"mark": 5, "trained": 5}, "mark", "5", "6"),  # ordinal 5 would be trained twice
        ({"mark": 7, "trained": 7}, "mark", "7", "6"),  # ordinal 6 would be lost
        ({"next": 7}, "next", "7", "8"),
        ({"next": 9}, "next", "9", "8"),
        ({"trained": 5, "dropped": {"filtered": 1}}, "trained", "5", "6"),
        ({"settled": ((7, 7),), "trained": 7}, "trained", "7", "6"),
        ({"settled": ((7, 7),)}, "settled", "7", "none"),
    ],
)
async def test_a_ledger_that_differs_from_the_log_is_refused_with_both_numbers(
    run, resume, run_id, tmp_path, changes, field, saved, logged
):
    await run.train(1, 2, 3)
    run.write_ledger(3, **changes)
    with pytest.raises(LedgerChanged) as refusal:
        await resume()
    error = refusal.value
    assert (error.run_id, error.step, error.older) == (run_id, 3, 2)
    assert error.path == tmp_path / run_id / final_name(3) / TRAINER_STATE
    assert error.difference == (field, saved, logged)
    assert f"has {saved} as {field} of its ledger, and the log has {logged}" in str(error)
    assert "--from-step 2 continues" in str(error)


async def test_ledgers_are_compared_with_the_lineage_that_is_current(run, resume, client, run_id):
    await run.train(1, 2, 3)
    await open_run(client, run_id, resume_from=StepRef(1, 2))
    # The epoch ended before its first step: the checkpoint and the ledger are those of step 2.
    usable = await resume()
    assert usable.checkpoint == StepRef(2, 2)
    run.write_ledger(2)  # of step 3, whose training counts no more
    with pytest.raises(LedgerChanged) as refusal:
        await resume()
    assert refusal.value.difference == ("mark", "6", "4")


async def test_a_damaged_ledger_is_one_sentence_with_the_file_and_the_older_checkpoint(
    run, resume, run_id, tmp_path
):
    await run.train(1, 2, 3)
    file = tmp_path / run_id / final_name(3) / TRAINER_STATE
    file.write_text("{")
    with pytest.raises(CheckpointUnusable) as refusal:
        await resume()
    assert (refusal.value.step, refusal.value.older) == (3, 2)
    assert str(file) in str(refusal.value)
    assert str(refusal.value).count("--fresh") == 0, "one way out"
    file.unlink()
    with pytest.raises(CheckpointUnusable, match="tells the prompts"):
        await resume()


async def test_a_missing_newest_checkpoint_names_the_newest_whole_older_one(run, resume):
    await run.train(1, 2, 3)
    shutil.rmtree(run.folder / final_name(3))
    (run.folder / final_name(2) / TRAINER_STATE).write_text("{")
    with pytest.raises(CheckpointMissing) as refusal:
        await resume()
    assert (refusal.value.step, refusal.value.older) == (3, 1), "step 2 is damaged"


async def test_the_previous_checkpoint_is_taken_where_the_run_says_so(run, resume):
    await run.train(1, 2, 3)
    shutil.rmtree(run.folder / final_name(3))
    (run.folder / final_name(2) / TRAINER_STATE).write_text("{")
    usable = await resume("previous")
    assert usable.checkpoint == StepRef(1, 1)
    assert [skipped.step for skipped in usable.skipped] == [3, 2]
    assert final_name(3) in usable.skipped[0].reason
    assert TRAINER_STATE in usable.skipped[1].reason


async def test_without_a_whole_checkpoint_only_a_fresh_start_remains(run, resume):
    await run.train(1)
    shutil.rmtree(run.folder / final_name(1))
    for on_damage in ("stop", "previous"):
        with pytest.raises(CheckpointMissing) as refusal:
            await resume(on_damage)
        assert refusal.value.older is None
        assert "--fresh" in str(refusal.value)


@pytest.mark.parametrize("has_folder", [False, True])
async def test_an_invented_checkpoint_does_not_hide_one_with_evidence(run, resume, has_folder):
    await run.train(1, 2)
    await run.announce_checkpoint(1000)
    if has_folder:
        folder = run.write_checkpoint(1000)
        for mark in (VERIFIED, MADE_FROM):
            (folder / mark).unlink()
    with pytest.raises(CheckpointMissing) as refusal:
        await resume()
    assert (refusal.value.step, refusal.value.older) == (1000, 2)
    assert (await resume("previous")).checkpoint == StepRef(1, 2)
    assert (await resume(from_step=1)).checkpoint == StepRef(1, 1)


@pytest.mark.parametrize("has_reducer", [False, True])
async def test_a_folder_without_its_name_counts_as_damaged_where_a_reducer_runs(
    run, resume, monkeypatch, has_reducer
):
    await run.train(1, 2)
    await run.announce_checkpoint(3)
    (run.folder / ".staging" / "epoch_1_step_3_a").mkdir(parents=True)  # a save that was killed
    short = partial(hold_checkpoint, deadline=0.2)
    monkeypatch.setattr("trinity_workers.launch.resume.hold_checkpoint", short)
    if has_reducer:
        usable = await resume("previous", has_reducer=True)
        assert usable.checkpoint == StepRef(1, 2)
        return
    with pytest.raises(CheckpointMissing) as refusal:
        await resume("previous")
    assert (refusal.value.step, refusal.value.older) == (3, 2)


async def test_a_checkpoint_of_a_step_that_the_log_did_not_train_is_refused(run, resume):
    await run.train(1, 2)
    run.write_checkpoint(7)
    await run.announce_checkpoint(7)
    with pytest.raises(CheckpointUnusable, match="the log does not have the prompts") as refusal:
        await resume()
    assert (refusal.value.step, refusal.value.older) == (7, 2)


@pytest.mark.parametrize("change", [b"WEIGHTS", b"weight"])
async def test_a_damaged_file_is_named_with_the_older_checkpoint(run, resume, change):
    await run.train(1, 2, 3)
    for step in (1, 2, 3):
        folder = run.folder / final_name(step)
        write_manifest(folder, sums_below([folder / name for name in saved_files(folder)], folder))
    for step in (2, 3):
        (run.folder / final_name(step) / "model.pt").write_bytes(change)
    with pytest.raises(CheckpointUnusable) as refusal:
        await resume()
    assert (refusal.value.step, refusal.value.older) == (3, 1)
    assert str(run.folder / final_name(3) / "model.pt") in refusal.value.reason
    usable = await resume("previous")
    assert usable.checkpoint == StepRef(1, 1)
    assert [skipped.step for skipped in usable.skipped] == [3, 2]


@pytest.fixture
def launch(redis_url, run_id, tmp_path):
    """Starts the run's trainer in this process, with these settings."""

    async def start(**settings):
        options = LaunchOptions(
            run_id=run_id,
            alone=False,
            settings=TrainConfig(steps=9, **settings),
            redis_url=redis_url,
            weights_redis_url=redis_url,
            checkpoint_root=tmp_path,
        )
        await run_job(options, lambda summary: None)

    return start


@pytest.mark.processes
async def test_a_changed_ledger_ends_the_command_before_an_epoch_is_opened(run, launch):
    await run.train(1, 2, 3)
    run.write_ledger(3, mark=5, trained=5)
    with pytest.raises(LedgerChanged) as refusal:
        await launch()
    assert refusal.value.difference == ("mark", "5", "6")
    assert await run.publisher.log.newest_epoch() == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"seed": 7}, "seed"),
        ({"trainer": TrainerConfig(engine="megatron")}, "trainer.engine"),
        ({"task": TaskConfig(name="sort-digits")}, "task.name"),
    ],
)
async def test_a_setting_that_cannot_change_ends_the_command_before_an_epoch_is_opened(
    client, log, run_id, tmp_path, launch, changed, name
):
    settings = TrainConfig(steps=9)
    epoch = await open_run(client, run_id, config=settings.to_text())
    run = TrainedRun(AsyncPublisher(log, epoch, new_producer("trainer")), tmp_path / run_id)
    run.fingerprint = task_of(settings).fingerprint
    await run.train(1)
    with pytest.raises(SettingsNotResumable) as refusal:
        await launch(**changed)
    assert [change.name for change in refusal.value.changes] == [name]
    assert await log.newest_epoch() == 1


async def test_what_a_resume_changes_and_passes_over_is_printed_and_in_the_log(
    cli, client, log, redis_url, run_id, tmp_path
):
    file = tmp_path / "run.yaml"
    file.write_text(f"checkpoints: {{root: {tmp_path}, on_damage: previous}}")
    settings = read_config(file, []).checked()
    epoch = await open_run(client, run_id, config=settings.to_text())
    run = TrainedRun(AsyncPublisher(log, epoch, new_producer("trainer")), tmp_path / run_id)
    run.fingerprint = task_of(settings).fingerprint
    await run.train(1, 2)
    (run.folder / final_name(2) / TRAINER_STATE).write_text("{")
    command = [
        *(sys.executable, "-m", "trinity_events", "train", str(file), "--run", run_id),
        *("--redis-url", redis_url, "--weights-redis-url", redis_url, "--parts", "trainer"),
        *("--set", "trainer.learning_rate=0.25", "--set", "steps=9"),
    ]
    with child(command, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "goes on with step 2" in " ".join("".join(lines).split()):
                break
        process.terminate()
        process.communicate(timeout=PATIENCE)
    printed = " ".join("".join(lines).split())
    assert "passed over the checkpoint of step 2" in printed
    assert "trainer.learning_rate from 0.0005 to 0.25" in printed
    [resumed] = [entry.event for entry in await events_of(log, RunResumed)]
    assert resumed.checkpoint == StepRef(1, 1)
    assert [skipped.step for skipped in resumed.skipped] == [2]
    changes = {change.name: (change.before, change.after) for change in resumed.changed}
    assert changes["trainer.learning_rate"] == ("0.0005", "0.25")
    # The first epoch's configuration is as it was written; a run resolves ranks and transport.
    resolved = {"sync.transport", "trainer.ranks"}
    assert changes.keys() - resolved == {"trainer.learning_rate", "steps"}
    explained = cli("explain", run_id, "--redis-url", redis_url, timeout=PATIENCE).stdout
    assert "The resume passed over the checkpoint of step 2" in explained
    assert "The resume changed" in explained
