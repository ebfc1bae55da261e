"""veRL's own merger, run on the shards that this project's FSDP engine and helper write."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.fsdp_runs import Where
from tests.support.rank_processes import Rank
from tests.support.tensors import identical
from trinity_events import CheckpointCoordinator
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.server import open_client
from trinity_workers.engines.fsdp import FSDPEngine
from trinity_workers.helpers import fsdp_save_state_dict

pytestmark = pytest.mark.timeout(420)  # its own deadlines are shorter, and say what is missing

UNEVEN = 3
"""Ranks that no dimension of the model is a multiple of."""


def save(rank: Rank, where: Where, folder: Path, how: str) -> dict[str, torch.Tensor]:
    """Save with the engine or the helper; returns the full weights."""
    engine = FSDPEngine(where.model_folder, device=torch.device("cpu"), learning_rate=1e-3)
    if how == "engine":
        engine.save_checkpoint(str(folder))
    else:
        log = SyncEventLog(open_client(where.redis_url), where.run_id)
        rank.exits.callback(log.close)
        publisher = Publisher(log, where.epoch, new_producer("actor", rank.number))
        rank.exits.callback(publisher.close)
        coordinator = CheckpointCoordinator(publisher, where.run_folder)
        fsdp_save_state_dict(engine, str(folder), 5, coordinator, logging.getLogger(__name__))
        coordinator.wait_all()
    return {name: value.clone() for name, value in engine.get_per_tensor_param()}


@pytest.mark.parametrize("how", ["engine", "helper"])
@pytest.mark.parametrize("world", [1, UNEVEN])
def test_verls_merger_makes_a_hugging_face_model_of_the_shards(
    rank_group, publisher, redis_url, weights_url, run_id, policy_folder, tmp_path, how, world
):
    where = Where(run_id, publisher.epoch, redis_url, weights_url, policy_folder, tmp_path / run_id)
    folder = where.run_folder / "actor"
    weights = rank_group(world)(save, where, folder, how)[0]
    merged = tmp_path / "merged"
    command = f"-m verl.model_merger merge --backend fsdp --local_dir {folder}".split()
    done = subprocess.run(
        [sys.executable, *command, "--target_dir", merged],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    merged_weights = load_file(merged / "model.safetensors")
    assert sorted(merged_weights) == sorted(weights)
    for name, tensor in weights.items():
        assert identical(merged_weights[name], tensor.bfloat16()), name
    assert (merged / "generation_config.json").is_file()
    assert (merged / "tokenizer.json").is_file()
