"""Folders that lack tensors of their model, or have others: refused by name, never filled in."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from tests.support.own_models import own_model  # noqa: E402
from tests.support.tensors import identical  # noqa: E402
from trinity_workers.algorithms.settings import AlgorithmConfig, TeacherConfig  # noqa: E402
from trinity_workers.config.sections.model import ModelConfig  # noqa: E402
from trinity_workers.config.train_config import TrainConfig  # noqa: E402
from trinity_workers.launch.run_check import find_mistakes  # noqa: E402
from trinity_workers.learning.policy import BadPolicy, check_policy, load_policy  # noqa: E402
from trinity_workers.learning.pretrained import (  # noqa: E402
    MismatchedTensor,
    MissingTensors,
    PolicyUnreadable,
    load_pretrained,
)
from trinity_workers.learning.reward_model import (  # noqa: E402
    check_reward_model,
    load_reward_model,
)
from trinity_workers.learning.values import load_critic  # noqa: E402
from trinity_workers.rewards.settings import RewardsConfig  # noqa: E402

Tensors = dict[str, Any]


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def remove_tensors(folder: Path, part: str) -> Path:
    return change_tensors(
        folder,
        lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name},
    )


def make_reward_folder(folder: Path) -> Path:
    """Write a model for sequence classification, with the tokenizer of the others."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    own_model(folder, "llama")
    config = LlamaConfig.from_pretrained(folder, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("read", [load_policy, check_policy])
@pytest.mark.parametrize(
    ("model", "part", "named"),
    [
        ("llama", "lm_head.weight", "lm_head.weight"),
        ("llama", "layers.1.", "model.layers.1.self_attn.q_proj.weight"),
        ("qwen2", "embed_tokens", "model.embed_tokens.weight"),
        ("qwen3-moe", "experts.3.down_proj", "model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_a_policy_folder_that_lacks_tensors_is_refused_by_their_names(
    tmp_path, read, model, part, named
):
    folder = remove_tensors(own_model(tmp_path, model), part)
    with pytest.raises(BadPolicy) as caught:
        read(folder)
    if model == "qwen3-moe":  # transformers merges experts, and fails where one lacks
        return
    assert isinstance(caught.value, MissingTensors)
    assert caught.value.path == folder
    assert named in caught.value.names
    assert caught.value.names[0] in str(caught.value)


@pytest.mark.parametrize("read", [load_policy, check_policy])
def test_a_policy_folder_with_a_tensor_of_another_shape_is_refused_by_its_name(tmp_path, read):
    folder = change_tensors(
        own_model(tmp_path, "llama"), lambda tensors: tensors | {"model.norm.weight": torch.ones(7)}
    )
    with pytest.raises(MismatchedTensor) as caught:
        read(folder)
    assert (caught.value.name, caught.value.shape) == ("model.norm.weight", (7,))


def test_whole_folders_load_alike_each_time_and_name_the_tensors_that_nothing_reads(
    tmp_path, caplog
):
    """Tied heads, computed buffers of older releases and a tensor too many are no reason."""
    more = {
        "model.extra": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    for name in ("qwen2", "llama", "qwen3-moe"):
        folder = change_tensors(own_model(tmp_path / name, name), lambda tensors: tensors | more)
        check_policy(folder)
        with caplog.at_level(logging.WARNING):
            (first, _), (second, _) = load_policy(folder), load_policy(folder)
        again = second.state_dict()
        assert all(identical(tensor, again[key]) for key, tensor in first.state_dict().items())
        assert "model.extra" in caplog.text
        assert "inv_freq" not in caplog.text


def test_a_critic_needs_no_output_head_and_every_other_tensor(tmp_path):
    folder = remove_tensors(own_model(tmp_path, "llama"), "lm_head")
    first, second = (load_critic(folder)[0].state_dict() for _ in range(2))
    assert all(identical(tensor, second[key]) for key, tensor in first.items())
    with pytest.raises(MissingTensors) as caught:
        load_critic(remove_tensors(folder, "model.norm"))
    assert caught.value.names == ("model.norm.weight",)


@pytest.mark.parametrize("read", [load_reward_model, check_reward_model])
def test_a_reward_model_without_its_head_is_refused_by_name(tmp_path, read):
    folder = make_reward_folder(tmp_path)
    read(folder)
    with pytest.raises(MissingTensors) as caught:
        read(remove_tensors(folder, "score"))
    assert caught.value.names == ("score.weight",)


@pytest.mark.parametrize("role", ["policy", "teacher", "reward model"])
async def test_a_run_is_refused_before_it_is_opened(tmp_path, role):
    broken = remove_tensors(own_model(tmp_path / "broken", "llama"), "lm_head")
    policy = broken if role == "policy" else own_model(tmp_path / "policy", "llama")
    if role == "reward model":
        broken = remove_tensors(make_reward_folder(tmp_path / "reward"), "score")
    config = TrainConfig(
        model=ModelConfig(path=str(policy)),
        algorithm=AlgorithmConfig(
            loss="divergence" if role == "teacher" else "ppo",
            teacher=TeacherConfig(path=str(broken) if role == "teacher" else None),
        ),
        rewards=RewardsConfig(reward_model=str(broken) if role == "reward model" else None),
    )
    [mistake] = await find_mistakes(config, tmp_path, alone=True, ray_address=None, thorough=True)
    assert isinstance(mistake, MissingTensors)
    assert mistake.path == broken


def make_gpt_oss(**sizes: Any) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**sizes, intermediate_size=16, num_local_experts=2))


def make_gemma_2(**sizes: Any) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**sizes, intermediate_size=16))


def make_mamba(**sizes: Any) -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(**{key: sizes[key] for key in ("vocab_size", "hidden_size")})
    )


@pytest.mark.parametrize("make", [make_gpt_oss, make_gemma_2, make_mamba])
def test_a_model_without_torchs_attention_is_refused_before_a_run_is_opened(tmp_path, make):
    folder = own_model(tmp_path, "llama")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    make(vocab_size=400, hidden_size=16, num_hidden_layers=1, **heads).save_pretrained(folder)
    with raises(PolicyUnreadable, reason=re.compile("scaled_dot_product_attention")):
        check_policy(folder)


@pytest.fixture
def own_head(tmp_path) -> Path:
    """A folder whose configuration says tied, and whose head is another matrix."""
    return with_own_head(own_model(tmp_path / "model", "qwen2"))


def with_own_head(folder: Path) -> Path:
    def add(tensors: Tensors) -> Tensors:
        table = tensors["model.embed_tokens.weight"]
        return tensors | {"lm_head.weight": table.flip(0).contiguous()}

    return change_tensors(folder, add)


def test_a_policy_with_a_head_of_its_own_says_that_it_is_not_tied(own_head, tmp_path):
    policy, _ = load_policy(own_head)
    assert not identical(policy.lm_head.weight, policy.model.embed_tokens.weight)
    assert policy.config.tie_word_embeddings is False
    tied, _ = load_policy(own_model(tmp_path / "tied", "qwen2"))
    assert tied.config.tie_word_embeddings is True


def test_tied_models_load_in_several_threads_at_once_and_ties_are_made_afterwards(own_model_folder):
    """transformers replaces the method that ties, in the whole process, while it loads."""
    folder, method = own_model_folder("qwen2"), PreTrainedModel.tie_weights

    def is_tied(_):
        model = load_pretrained(AutoModelForCausalLM, folder, torch.float32)
        return model.lm_head.weight is model.model.embed_tokens.weight

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_tied, range(8)))
    assert PreTrainedModel.tie_weights is method
