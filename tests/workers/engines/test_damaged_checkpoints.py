"""Each damage to each file of a checkpoint is one sentence on every rank, before anything loads."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.damage import (  # noqa: E402
    check_all,
    damage_all,
    flip,
    flipped_conversion,
    load,
    save,
)
from tests.support.rank_processes import Rank  # noqa: E402
from trinity_events.checkpoints.layout import MANIFEST  # noqa: E402
from trinity_events.checkpoints.verification import CheckpointDamaged, verify_files  # noqa: E402
from trinity_workers.conversion.convert import convert  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.learning.adapters import policy_loader  # noqa: E402
from trinity_workers.learning.lora_settings import LoraConfig  # noqa: E402

CPU = torch.device("cpu")


def make_fsdp(rank: Rank, model: Path, *, adapters: bool = False) -> None:
    load = policy_loader(LoraConfig(rank=2), 0) if adapters else None
    rank.objects.engine = FSDPEngine(model, device=CPU, learning_rate=1e-3, load=load)
    loss = rank.objects.engine.module(torch.tensor([[10, 20, 30]])).logits.square().mean()
    rank.objects.engine.optimizer_step(loss)


@pytest.mark.parametrize("adapters", [False, True], ids=["policy", "adapters"])
def test_each_damage_to_each_file_of_fsdp_is_raised_on_all_ranks(
    rank_group, policy_folder, tmp_path, adapters
):
    ranks, folder = rank_group(2), tmp_path / "global_step_5" / "actor"
    ranks(make_fsdp, policy_folder, adapters=adapters)
    ranks(save, folder)
    names = check_all(ranks(damage_all, folder), folder)
    part = "adapter" if adapters else "model"
    assert {f"{part}_world_size_2_rank_0.pt", "optim_world_size_2_rank_0.pt"} <= names
    assert {"fsdp_config.json", "adapter_config.json" if adapters else "config.json"} <= names
    assert ranks(load, folder) == [None, None]
    error = flipped_conversion(folder, f"{part}_world_size_2_rank_0.pt", tmp_path / "converted")
    assert error.path.name == f"{part}_world_size_2_rank_0.pt"


def test_without_verification_a_flipped_weight_is_loaded_as_before(
    rank_group, policy_folder, tmp_path
):
    ranks, folder = rank_group(1), tmp_path / "actor"
    ranks(make_fsdp, policy_folder)
    ranks(save, folder)
    flip(folder / "model_world_size_1_rank_0.pt")
    assert ranks(load, folder, "size") == [None]
    [error] = ranks.answers(load, folder)
    assert isinstance(error, CheckpointDamaged)
    (folder / MANIFEST).unlink()
    assert ranks(load, folder) == [None], "a checkpoint of an earlier version"


def test_a_converted_checkpoint_can_be_verified(policy_folder, tmp_path, caplog):
    """A folder of Hugging Face has its list of digests, and one of a user has none."""
    from trinity_workers.engines.model_folder import copy_files, write_model_folder

    source = tmp_path / "source"
    tensors = {"weight": torch.ones(3, 4)}
    write_model_folder(source, lambda at: copy_files(policy_folder, at), tensors.items())
    flip(source / "model.safetensors")
    with pytest.raises(CheckpointDamaged) as raised:
        convert(source, tmp_path / "target")
    assert raised.value.path == source / "model.safetensors"
    assert json.loads((source / "config.json").read_text())
    with caplog.at_level(logging.WARNING):
        assert not verify_files(policy_folder)
    assert not caplog.records
