"""The main job on Megatron, short but whole: nothing but the engine is another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")


def test_a_demo_on_megatron_applies_every_version_and_writes_whole_checkpoints(cli):
    done = cli(
        *("demo", "--engine", "megatron", "--run", "megatron-demo", "--json"),
        *("--steps", "8", "--save-interval", "4"),
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    log = summary["log"]
    assert (log["steps"], log["versions_published"], log["failures"]) == (8, 9, 0)
    assert log["versions_unaccounted"] == 0
    assert log["checkpoints_ready"] == 2
    folder = Path(summary["checkpoint_folder"])
    for name in ("latest_checkpointed_iteration.txt", "latest_state_dict_iteration.txt"):
        assert (folder / name).read_text() == "8"
    actor = folder / "global_step_8" / "actor"
    assert {one.name for one in actor.iterdir()} == {"model", "training", "huggingface"}
    assert (actor / "model" / "metadata.json").is_file()
