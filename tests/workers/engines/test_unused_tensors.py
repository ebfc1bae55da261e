"""Tensors for which a model has no place: used, or refused by name, and never lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from safetensors.torch import save_file  # noqa: E402

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.manifests import drop_manifests  # noqa: E402
from tests.support.own_models import own_model  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from tests.support.tensors import identical  # noqa: E402
from trinity_workers.conversion.convert import convert  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.engines.megatron import ParallelLayout  # noqa: E402
from trinity_workers.engines.model_folder import UnusedTensors  # noqa: E402
from trinity_workers.learning.policy import load_policy  # noqa: E402

pytestmark = pytest.mark.megatron

TOKENS = torch.tensor([[10, 20, 30, 40]])


def write_tensors(folder: Path, like: Path, tensors: dict[str, Any]) -> Path:
    folder.mkdir()
    for file in like.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def extended_folder(megatron_folder, tmp_path):
    """Make a folder of a tied model with one more tensor."""

    def make(name: str, value: torch.Tensor) -> Path:
        tensors = at.in_folder(megatron_folder("qwen2")) | {name: value}
        return write_tensors(tmp_path / "source", megatron_folder("qwen2"), tensors)

    return make


def untied_folder(folder: Path) -> Path:
    """Write a model whose configuration says tied, and whose head is another matrix."""
    source = own_model(folder / "tied", "qwen2")
    tensors = at.in_folder(source)
    head = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    return write_tensors(folder / "untied", source, tensors | {"lm_head.weight": head})


def tie_of(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text())["tie_word_embeddings"])


def set_tied(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))


def test_a_conversion_to_megatron_refuses_a_tensor_without_a_place_by_its_name(
    converting, extended_folder, tmp_path
):
    source = extended_folder("model.extra.weight", torch.ones(2))
    with pytest.raises(UnusedTensors) as caught:
        converting(source, tmp_path / "target")
    assert (caught.value.path, caught.value.names) == (source, ("model.extra.weight",))
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["the same head", "a computed buffer"])
def test_a_conversion_leaves_out_what_the_model_has_elsewhere(
    converting, extended_folder, megatron_folder, tmp_path, kind
):
    weights = at.in_folder(megatron_folder("qwen2"))
    if kind == "the same head":
        source = extended_folder("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    else:
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        source = extended_folder(name, torch.ones(4))
    converting(source, tmp_path / "there")
    converting(tmp_path / "there", tmp_path / "back")
    at.assert_same(at.in_folder(tmp_path / "back"), weights)
    assert tie_of(tmp_path / "back")


def test_a_head_of_its_own_goes_to_megatron_and_back(converting, tmp_path):
    source = untied_folder(tmp_path)
    converting(source, tmp_path / "there")
    converting(tmp_path / "there", tmp_path / "back")
    at.assert_same(at.in_folder(tmp_path / "back"), at.in_folder(source))
    assert not tie_of(tmp_path / "back")
    # A checkpoint of an earlier release: its configuration still says tied.
    set_tied(drop_manifests(tmp_path / "there") / "huggingface")
    with pytest.raises(UnusedTensors) as caught:
        converting(tmp_path / "there", tmp_path / "again")
    assert caught.value.names == ("output_layer.weight",)


def save_shards(rank: Rank, source: Path, folder: Path) -> torch.Tensor:
    """Save a checkpoint of a folder's model, and return its logits."""
    engine = FSDPEngine(source, device=torch.device("cpu"), learning_rate=1e-3)
    engine.save_checkpoint(str(folder))
    with torch.no_grad():
        return engine.module(input_ids=TOKENS, use_cache=False).logits.clone()


def test_a_head_of_its_own_is_trained_saved_and_exported_with_fsdp(rank_group, tmp_path):
    source, step = untied_folder(tmp_path), tmp_path / "step"
    [trained] = rank_group(1)(save_shards, source, step / "actor")
    convert(step, tmp_path / "exported")
    exported, _ = load_policy(tmp_path / "exported")
    with torch.no_grad():
        assert identical(exported(TOKENS).logits, trained)
    assert not tie_of(tmp_path / "exported")
    assert at.in_folder(tmp_path / "exported").keys() == at.in_folder(source).keys()
    set_tied(drop_manifests(step) / "actor" / "huggingface")
    with pytest.raises(UnusedTensors) as caught:
        convert(step, tmp_path / "again")
    assert caught.value.names == ("lm_head.weight",)


def refusal(rank: Rank, folder: Path, layout: ParallelLayout) -> tuple[str, ...]:
    try:
        at.make_engine(rank, folder, layout)
    except UnusedTensors as error:
        return error.names
    return ()


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen2", ParallelLayout(pipeline=2)), ("qwen3-moe", ParallelLayout(expert=2))],
)
def test_megatron_refuses_a_tensor_without_a_place_on_all_ranks(
    rank_group, megatron_folder, tmp_path, name, layout
):
    like = megatron_folder(name)
    more = {"model.extra.weight": torch.ones(2)}
    source = write_tensors(tmp_path / "source", like, at.in_folder(like) | more)
    ranks = rank_group(2)
    assert ranks(refusal, source, layout) == [("model.extra.weight",)] * 2
    assert ranks(refusal, like, layout) == [(), ()]


def test_megatron_trains_a_head_of_its_own(rank_group, tmp_path):
    source = untied_folder(tmp_path)
    ranks = rank_group(2)
    ranks(at.make_engine, source, ParallelLayout(tensor=2))
    at.assert_same(ranks(at.full_weights)[1], at.in_folder(source))
