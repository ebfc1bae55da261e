"""Converting between Hugging Face folders and Megatron checkpoints."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests import megatron_ranks as at  # noqa: E402
from trinity_workers.engines.megatron import ParallelLayout  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # its own deadlines are shorter, and say what is missing


def convert(rank, source, target, **keywords):
    from trinity_workers.convert import convert

    return convert(source, target, **keywords)


@pytest.fixture
def converting(rank_processes):
    """Converts in a process of its own."""
    rank_processes.leave()
    rank_processes.start(1)

    def run(source, target, **keywords):
        from functools import partial

        answer = rank_processes.ask(0, partial(convert, **keywords), source, target)()
        if isinstance(answer, Exception):
            raise answer
        return answer

    return run


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen2-untied", "qwen3", "llama", "qwen3-moe", "qwen2-moe"]
)
def test_a_model_comes_back_bit_for_bit(converting, megatron_folder, tmp_path, name):
    there = converting(megatron_folder(name), tmp_path / "megatron")
    back = converting(tmp_path / "megatron", tmp_path / "back", shard_bytes=20_000)
    assert (there.to, back.to) == ("megatron", "huggingface")
    assert there.bytes == back.bytes
    at.assert_same(at.in_folder(tmp_path / "back"), at.in_folder(megatron_folder(name)))
    files = sorted(one.name for one in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_bfloat16_stays_bfloat16(converting, megatron_folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    [file] = megatron_folder("qwen3").glob("*.safetensors")
    weights = {name: value.bfloat16() for name, value in load_file(file).items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_bytes((file.parent / "config.json").read_bytes())
    converting(source, tmp_path / "megatron")
    converting(tmp_path / "megatron", tmp_path / "back")
    at.assert_same(at.in_folder(tmp_path / "back"), weights)


def load(rank, folder):
    rank.held.engine.load_checkpoint(str(folder))


def test_what_was_converted_loads_at_any_layout(
    converting, engine_ranks, megatron_folder, tmp_path
):
    converting(megatron_folder("llama"), tmp_path / "megatron")
    layout = ParallelLayout(tensor=2)
    ranks = engine_ranks("llama", 2, layout, load_weights=False)
    ranks(load, tmp_path / "megatron")
    at.assert_same(ranks(at.full_weights)[1], at.in_folder(megatron_folder("llama")))


def test_what_cannot_be_converted_leaves_nothing(converting, megatron_folder, tmp_path):
    from trinity_events.errors import TrinityError

    (tmp_path / "empty").mkdir()
    with pytest.raises(TrinityError, match="neither a Hugging Face folder"):
        converting(tmp_path / "empty", tmp_path / "target")
    with pytest.raises(TrinityError, match="is there already"):
        converting(megatron_folder("qwen2"), megatron_folder("qwen3"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((megatron_folder("qwen2") / "config.json").read_bytes())
    save_file({"model.norm.weight": torch.ones(32)}, broken / "model.safetensors")
    with pytest.raises(TrinityError, match="has no tensor"):
        converting(broken, tmp_path / "target")
    assert {one.name for one in tmp_path.iterdir()} == {"empty", "broken"}
