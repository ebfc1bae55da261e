"""Each damage to each file of a checkpoint is one sentence on every rank, before anything loads."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402

from tests.support.damage import DAMAGE, check, flip, restored  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from trinity_events.checkpoint_layout import MANIFEST  # noqa: E402
from trinity_events.checkpoint_manifest import saved_files  # noqa: E402
from trinity_events.verify_checkpoint import CheckpointDamaged, verify_files  # noqa: E402
from trinity_workers.convert import convert  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.learning.adapters import policy_loader  # noqa: E402
from trinity_workers.lora_settings import LoraConfig  # noqa: E402

CPU = torch.device("cpu")


def make_fsdp(rank: Rank, model: Path, *, adapters: bool = False) -> None:
    load = policy_loader(LoraConfig(rank=2), 0) if adapters else None
    rank.held.engine = FSDPEngine(model, device=CPU, learning_rate=1e-3, load=load)
    loss = rank.held.engine.module(torch.tensor([[10, 20, 30]])).logits.square().mean()
    rank.held.engine.optimizer_step(loss)


def save(rank: Rank, folder: Path) -> None:
    rank.held.engine.save_checkpoint(str(folder))


def load(rank: Rank, folder: Path, mode: str = "full") -> BaseException | None:
    rank.held.engine.verify_mode = mode
    try:
        rank.held.engine.load_checkpoint(str(folder))
    except Exception as error:
        return error
    return None


def damage_all(rank: Rank, folder: Path) -> list[tuple[str, str, Any]]:
    """Damage each file in each way, and load; return the errors by file and kind of damage."""
    errors: list[tuple[str, str, Any]] = []
    for name in sorted(saved_files(folder)):
        for kind in DAMAGE if (folder / name).stat().st_size else ["gone", "extra"]:

            def attempt() -> BaseException | None:
                dist.barrier()
                error = load(rank, folder)
                dist.barrier()
                return error

            if rank.number == 0:
                errors.append((name, kind, restored(folder / name, DAMAGE[kind][0], attempt)))
            else:
                errors.append((name, kind, attempt()))
    dist.barrier()
    return errors


def check_all(answers: list[list[tuple[str, str, Any]]], folder: Path) -> set[str]:
    """Assert that all ranks raised the same; return the names of the damaged files."""
    for reports in zip(*answers, strict=True):
        name, kind, _ = reports[0]
        for _, _, error in reports:
            check(error, folder / name, kind)
        assert len({str(error) for _, _, error in reports}) == 1
    return {Path(name).name for name, _, _ in answers[0]}


def flipped_conversion(folder: Path, file: str, target: Path) -> CheckpointDamaged:
    def attempt() -> CheckpointDamaged:
        with pytest.raises(CheckpointDamaged) as raised:
            convert(folder, target)
        return raised.value

    error = restored(folder / file, flip, attempt)
    assert isinstance(error, CheckpointDamaged)
    assert not target.exists()
    return error


@pytest.mark.parametrize("adapters", [False, True], ids=["policy", "adapters"])
def test_each_damage_to_each_file_of_fsdp_is_raised_on_all_ranks(
    rank_group, policy_folder, tmp_path, adapters
):
    ranks, folder = rank_group(2), tmp_path / "global_step_5" / "actor"
    ranks(make_fsdp, policy_folder, adapters=adapters)
    ranks(save, folder)
    names = check_all(ranks(damage_all, folder), folder)
    part = "adapter" if adapters else "model"
    assert {f"{part}_world_size_2_rank_1.pt", "optim_world_size_2_rank_0.pt"} <= names
    assert {"fsdp_config.json", "tokenizer.json"} <= names
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
    [error] = ranks(load, folder)
    assert isinstance(error, CheckpointDamaged)
    (folder / MANIFEST).unlink()
    assert ranks(load, folder) == [None], "a checkpoint of an earlier version"


def test_each_damage_to_each_file_of_megatron_is_raised_on_all_ranks(
    engine_ranks, tmp_path, megatron_folder
):
    pytest.importorskip("megatron.core")
    from trinity_workers.engines.megatron import OptimizerOptions, ParallelLayout

    trained = OptimizerOptions(learning_rate=1e-3)
    ranks = engine_ranks("qwen3", 2, ParallelLayout(tensor=2), trained)
    folder = tmp_path / "global_step_5" / "actor"
    ranks(save, folder)
    names = check_all(ranks(damage_all, folder), folder)
    assert {".metadata", "common.pt", "metadata.json", "rank_1.pt", "__1_0.distcp"} <= names
    assert ranks(load, folder) == [None, None]
    error = flipped_conversion(folder, "model/.metadata", tmp_path / "converted")
    assert error.path == folder / "model" / ".metadata"


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
