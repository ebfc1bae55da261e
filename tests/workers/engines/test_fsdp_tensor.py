"""Ranks that share layers on FSDP compute the numbers of one rank; unfit models are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.distributed.tensor import Replicate  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from tests.support.experiences import make_groups  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from tests.support.tensors import assert_equal  # noqa: E402
from trinity_events.weights.slices import TensorSlice, coverage_error, full_slice  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.engines import fsdp_tensor  # noqa: E402
from trinity_workers.engines.adamw import AdamWOptions  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.engines.fsdp_options import FSDPOptions  # noqa: E402
from trinity_workers.engines.fsdp_tensor import (  # noqa: E402
    TensorParallelRefused,
    TensorRanks,
    divide_layers,
)
from trinity_workers.engines.offload import Offload  # noqa: E402
from trinity_workers.helpers.fsdp import fsdp_shards  # noqa: E402
from trinity_workers.learning import logprobs as logprobs_module  # noqa: E402
from trinity_workers.learning.logprobs import response_statistics  # noqa: E402
from trinity_workers.learning.policy import save_policy  # noqa: E402

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 101,  # two ranks have 51 rows and 50
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STEPS = 3


@pytest.fixture(scope="module")
def untied(policy_folder, tmp_path_factory) -> Path:
    """Return a Qwen3 with a head of its own, whose norms compute with a rank's heads alone."""
    folder = tmp_path_factory.mktemp("untied")
    shutil.copytree(policy_folder, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, head_dim=8, attention_bias=True, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # else all ones and zeros
                parameter.add_(torch.randn_like(parameter) / 4)
    save_policy(model, folder)
    return folder


@pytest.fixture
def folders(policy_folder, untied) -> dict[str, Path]:
    return {"tied": policy_folder, "untied": untied}


class Numbers(NamedTuple):
    """What some steps computed: log-probabilities and entropies of the last, norms, weights."""

    logprobs: Any
    entropy: Any
    norms: list[float]
    weights: dict[str, Any]


def open_engine(folder: Path, tensor: int, **options: Any) -> FSDPEngine:
    ranks = TensorRanks.of(tensor, CPU)
    return FSDPEngine(
        folder,
        device=CPU,
        learning_rate=1e-3,
        adamw=AdamWOptions(max_grad_norm=0.5),
        options=FSDPOptions(tensor=ranks, **options),
        offload=Offload(optimizer_offload=True),
    )


def take_step(rank: Rank, seed: int, tensor: int = 1, *, fused: bool = True, factor: float = 1.0):
    """Take a step on the rows of this rank's replica; return its statistics and the norm."""
    engine, replicas = rank.objects.engine, rank.world // tensor
    rows = make_groups("r", seed)
    batch = collate(rows[rank.number // tensor :: replicas], 0)
    total = collate(rows, 0).token_count
    statistics = response_statistics(engine.module, batch, 0.7, entropy=True, fused=fused)
    weights = torch.arange(batch.response_width) % 3 - 0.5  # the same for batches of any width
    loss = (statistics.logprobs * weights - 0.1 * statistics.entropy).sum() / total
    return statistics, engine.optimizer_step(loss * replicas * factor)


def numbers(
    rank: Rank,
    folder: Path,
    tensor: int = 1,
    fault: str | None = None,
    *,
    fused: bool = True,
    **options: Any,
) -> Numbers:
    """Take some steps, with a planted fault if one is named."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "head":  # hidden states get the gradient of this rank's tokens alone
            patch.setattr(logprobs_module, "Partial", Replicate)
        if fault == "heads":  # norms of heads get the gradient of this rank's heads alone
            patch.setattr(fsdp_tensor, "Partial", Replicate)
        factor = float(tensor) if fault == "factor" else 1.0
        engine = rank.objects.engine = open_engine(folder, tensor, **options)
        steps = [take_step(rank, seed, tensor, fused=fused, factor=factor) for seed in range(STEPS)]
        statistics = steps[-1][0]
        return Numbers(
            statistics.logprobs.detach(),
            statistics.entropy.detach(),
            [norm for _, norm in steps],
            dict(engine.get_per_tensor_param()),
        )


def find_differences(mine: Numbers, whole: Numbers, replica: int, replicas: int) -> list[str]:
    """Return the names of what differs by more than sums in another order do."""
    groups, rows = make_groups("r", STEPS - 1), []
    first = 0
    for number, group in enumerate(groups):
        rows += range(first, first + len(group)) if number % replicas == replica else ()
        first += len(group)

    def differs(tensor: Any, expected: Any, close: float) -> bool:
        return not torch.allclose(tensor, expected, rtol=0, atol=close)

    width = mine.logprobs.shape[1]  # a batch is as wide as its longest row
    return [
        *(["logprobs"] if differs(mine.logprobs, whole.logprobs[rows, :width], 1e-4) else []),
        *(["entropy"] if differs(mine.entropy, whole.entropy[rows, :width], 1e-4) else []),
        *(["norms"] if mine.norms != pytest.approx(whole.norms, rel=1e-4) else []),
        *(
            name
            for name, tensor in mine.weights.items()
            if differs(tensor, whole.weights[name], 1e-4)
        ),
    ]


FAULTS = {
    "head": "norms",
    "heads": "model.layers.0.self_attn.q_norm.weight",
    "factor": "norms",
}
"""Numbers that show a planted fault."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("tied", {}),
    "untied": ("untied", {"fused": False}),
    "layers apart, computed again, packed": (
        "untied",
        {"shard_layers_from": 1, "recompute": True, "packing": True},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_that_share_layers_have_the_numbers_of_one(rank_group, folders, way):
    name, options = WAYS[way]
    [whole] = rank_group(1)(numbers, folders[name], **options)
    # AdamW would hide a factor of the gradients, and norms before the clip do not.
    assert min(whole.norms) > 1e-2
    ranks = rank_group(2)
    for mine in ranks(numbers, folders[name], 2, **options):
        assert find_differences(mine, whole, 0, 1) == []
    if way == "untied":
        for fault, seen_in in FAULTS.items():
            mine = ranks(numbers, folders[name], 2, fault)[0]
            assert seen_in in find_differences(mine, whole, 0, 1)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_replicas_whose_ranks_share_layers_have_the_numbers_of_one(rank_group, folders, name):
    [whole] = rank_group(1)(numbers, folders[name])
    ranks = rank_group(4)
    for number, mine in enumerate(ranks(numbers, folders[name], 2)):
        assert find_differences(mine, whole, number // 2, 2) == []
    # The shards that ranks publish are every element of every tensor, once.
    places: dict[str, list[TensorSlice]] = {}
    tensors: dict[str, Any] = {}
    for shards in ranks(published):
        for key, offsets, global_shape, tensor in shards:
            place = TensorSlice(offsets, tuple(tensor.shape))
            places.setdefault(key, []).append(place)
            whole_tensor = tensors.setdefault(key, torch.empty(global_shape))
            whole_tensor[place.inside(full_slice(global_shape))] = tensor
    for key, slices in places.items():
        assert coverage_error(full_slice(tensors[key].shape), slices) is None, key
    assert_equal(tensors, ranks(full_weights)[0])


def published(rank: Rank) -> list[tuple[str, Any, Any, Any]]:
    return [
        (shard.name, shard.offsets, shard.global_shape, shard.tensor)
        for shard in fsdp_shards(rank.objects.engine.module)
    ]


def full_weights(rank: Rank) -> dict[str, Any]:
    return dict(rank.objects.engine.get_per_tensor_param())


def continued(rank: Rank, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights after a step behind a save, and after that step behind its load."""
    engine, weights = rank.objects.engine, []
    engine.save_checkpoint(str(folder))
    for _ in range(2):
        take_step(rank, 7, 2)
        weights.append(full_weights(rank))
        take_step(rank, 8, 2)
        engine.load_checkpoint(str(folder))
    return weights[0], weights[1]


def test_a_checkpoint_of_shared_layers_continues_bit_for_bit(rank_group, folders, tmp_path):
    ranks = rank_group(2)
    ranks(numbers, folders["tied"], 2)
    for undisturbed, loaded in ranks(continued, tmp_path):
        assert_equal(loaded, undisturbed)


def divided(rank: Rank, config: Any, fault: str | None = None) -> None:
    """Divide a random model."""
    del rank
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if fault == "columns":  # an activation that depends on all columns of a layer
        model.model.layers[0].mlp.act_fn = torch.nn.Softmax(dim=-1)
    ranks = TensorRanks.of(2, CPU)
    assert ranks is not None
    divide_layers(model, ranks)


EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("config", "fault", "attributes"),
    [
        (
            GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4),
            None,
            {"fault": "plan", "model": "GPT2LMHeadModel"},
        ),
        (Qwen3MoeConfig(**SIZES, **EXPERTS), None, {"fault": "style"}),
        (
            LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
            None,
            {"fault": "parts", "what": "key-value heads", "count": 1, "ranks": 2},
        ),
        (
            LlamaConfig(**SIZES | {"intermediate_size": 63}),
            None,
            {"fault": "parts", "what": "columns of model.layers.0.mlp.gate_proj", "count": 63},
        ),
        (LlamaConfig(**SIZES), "columns", {"fault": "logits", "model": "LlamaForCausalLM"}),
    ],
    ids=["no plan", "experts", "heads", "columns", "other logits"],
)
def test_a_model_that_cannot_be_divided_is_refused_on_every_rank(
    rank_group, config, fault, attributes
):
    for answer in rank_group(2).answers(divided, config, fault):
        with raises(TensorParallelRefused, **attributes):
            raise answer
