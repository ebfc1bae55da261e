"""The method checkpoint, short but whole: explorers load each version from its files."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from tests.support.run_processes import ended, small_run
from tests.support.waits import wait_until
from trinity_events.checkpoints.layout import parse_final_name
from trinity_events.core.file_versions import WEIGHTS_SAVE
from trinity_schemas import SaveFinished, WeightsApplied

pytestmark = [pytest.mark.processes, pytest.mark.heavy]

STEPS, INTERVAL = 6, 3
OF_A_CHECKPOINT = {
    "fsdp": {"huggingface", "optim_world_size_2_rank_0.pt", "optim_world_size_2_rank_1.pt"},
    "megatron": {"huggingface", "training"},
}


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("megatron", marks=pytest.mark.nightly)])
def test_explorers_load_versions_from_files_and_so_does_one_that_joins_late(
    processes, policy_folder, engine
):
    if engine == "megatron":
        pytest.importorskip("megatron.core")
    file = small_run(
        processes.folder,
        policy_folder,
        steps=STEPS,
        sync={"method": "checkpoint"},
        trainer={"engine": engine, "ranks": 2},
        explorer={"count": 2},
        checkpoints={"interval": INTERVAL},
    )
    own = ("--config", str(file))  # the log may not name a folder to an explorer
    processes.start("reducer")
    first = processes.start("explorer", "--rank", "0", *own)
    trainer = processes.start("train", str(file), "--parts", "trainer", "--json")
    processes.wait_for_announcements(3, trainer)
    first.kill()  # the trainer waits for the late one, which answers the rest
    late = processes.start("explorer", "--rank", "1", "--json", *own)

    status, out, error = ended(trainer, 300)
    assert status == 0, error
    assert "weights travel by files" in error
    summary = json.loads(out)
    log = summary["log"]
    assert (summary["transport"], log["versions_published"]) == ("files", STEPS + 1)
    assert (log["versions_unaccounted"], log["failures"], log["checkpoints_ready"]) == (0, 0, 2)
    result = json.loads(ended(late)[1])
    assert result["applied"]
    assert result["groups"]

    processes.wait_for_reports()
    events = [entry.event for entry in processes.log()]
    saved = {
        event.slot.step: event.digest
        for event in events
        if isinstance(event, SaveFinished) and event.slot.name == WEIGHTS_SAVE
    }
    applied = [event for event in events if isinstance(event, WeightsApplied)]
    assert saved.keys() == set(range(STEPS + 1)), "the weights of each step are saved once"
    assert all(event.digest == saved[event.version.step] for event in applied)
    assert {STEPS} <= {event.version.step for event in applied} <= saved.keys()

    run = processes.folder / processes.run_id
    actor = run / f"global_step_{STEPS}" / "actor"
    assert {path.name for path in actor.iterdir()} == OF_A_CHECKPOINT[engine]
    AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    wait_until(lambda: steps_of(run) <= {INTERVAL, STEPS})


def steps_of(run) -> set[int]:
    """Return the steps whose folders are there: those of versions go as newer ones are ready."""
    steps = {parse_final_name(path.name) for path in run.iterdir()}
    return {step for step in steps if step is not None}
