"""Recomputation, offload and packing on FSDP: less memory, and the numbers of plain training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from tests.support.batches import batch_of  # noqa: E402
from tests.support.tensors import assert_equal  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine, frozen_policy  # noqa: E402
from trinity_workers.engines.fsdp_options import FSDPOptions, RecomputeRefused  # noqa: E402
from trinity_workers.learning.logprobs import response_logprobs, response_statistics  # noqa: E402
from trinity_workers.learning.packing import PackingRefused, check_isolation  # noqa: E402
from trinity_workers.learning.values import load_critic, response_values  # noqa: E402

CPU = torch.device("cpu")
RATE = 1e-3


def make_engine(folder, **settings):
    torch.manual_seed(0)
    engine = FSDPEngine(folder, device=CPU, learning_rate=RATE, **settings)
    engine.module.train()
    return engine


def train(rank, engine, seeds):
    """Steps in two micro-batches each; returns their losses and gradient norms."""
    metrics = []
    for seed in seeds:
        losses = []
        parts = batch_of(rank, seed).equal_parts(2)
        for index, part in enumerate(parts):
            statistics = response_statistics(engine.module, part, entropy=True)
            loss = (0.1 * statistics.entropy - statistics.logprobs).sum() / 100
            engine.accumulate(loss, first=index == 0, last=index == len(parts) - 1)
            losses.append(float(loss.detach()))
        metrics += [*losses, engine.apply_gradients()]
    return metrics


def gradients(rank, engine):
    """Gradients of one micro-batch, in full."""
    statistics = response_statistics(engine.module, batch_of(rank, 1), entropy=True)
    engine.accumulate(
        (0.1 * statistics.entropy - statistics.logprobs).sum() / 100, first=True, last=True
    )
    named = engine.module.named_parameters()
    return {name: parameter.grad.full_tensor().clone() for name, parameter in named}


def masters(engine):
    return {name: tensor.clone() for name, tensor in engine.master_params()}


def shapes_of_inputs(module):
    """The shapes that the first layer computes, one for each time."""
    shapes = []
    layer = module.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape[:2])))
    return shapes


def compare(rank, folder, dtype, by_layers):
    """Return what each option comes to, and the shapes that it computed in the last step."""
    results, layers_from = {}, 0 if by_layers else 10_000_000
    for name in ("plain", "recompute", "cpu_offload", "packing"):
        chosen = {} if name == "plain" else {name: True}
        options = FSDPOptions(shard_layers_from=layers_from, **chosen)
        engine = make_engine(folder, dtype=dtype, options=options)
        slopes = gradients(rank, engine)
        metrics = train(rank, engine, (1, 2))
        shapes = shapes_of_inputs(engine.module)
        metrics += train(rank, engine, (3,))
        results[name] = metrics, masters(engine), shapes, slopes
    parts = batch_of(rank, 3).equal_parts(2)
    return results, [
        (int(part.attention_mask.sum()), part.attention_mask.numel()) for part in parts
    ]


@pytest.mark.parametrize(
    ("dtype", "by_layers"), [("float32", True), ("float32", False), ("bfloat16", True)]
)
def test_each_option_trains_as_none_does(rank_group, policy_folder, dtype, by_layers):
    for results, sizes in rank_group(2)(compare, policy_folder, dtype, by_layers):
        metrics, weights, shapes, slopes = results["plain"]
        assert [rows * columns for rows, columns in shapes] == [padded for _, padded in sizes]
        for name in ("recompute", "cpu_offload"):
            assert results[name][0] == metrics
            assert_equal(results[name][1], weights)
        assert results["recompute"][2] == [shape for shape in shapes for _ in range(2)], (
            "once more each"
        )
        packed, _, packed_shapes, packed_slopes = results["packing"]
        assert packed_shapes == [(1, tokens) for tokens, _ in sizes], "no padding is computed"
        # Of the first step: AdamW makes whole steps of gradients that are nothing but rounding.
        close = 1e-5 if dtype == "float32" else 2e-2
        assert packed[:3] == pytest.approx(metrics[:3], rel=close)
        largest = max(float(slope.abs().max()) for slope in slopes.values())
        for name, slope in packed_slopes.items():
            torch.testing.assert_close(slope, slopes[name], rtol=0, atol=close * largest)


def offloads(rank, folder, at):
    """Save under offload, and continue from the files with and without it."""
    engine = make_engine(folder, dtype="bfloat16", options=FSDPOptions(cpu_offload=True))
    states = [
        module._get_fsdp_state() for module in engine.module.modules() if hasattr(module, "unshard")
    ]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group]
    assert all(parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params)
    train(rank, engine, (1, 2))
    engine.save_checkpoint(str(at))
    expected = train(rank, engine, (3,)), masters(engine)
    for cpu_offload in (True, False):
        again = make_engine(folder, dtype="bfloat16", options=FSDPOptions(cpu_offload=cpu_offload))
        again.load_checkpoint(str(at))
        assert train(rank, again, (3,)) == expected[0]
        assert_equal(masters(again), expected[1])


def test_what_is_offloaded_is_saved_and_resumed_to_the_bit(rank_group, policy_folder, tmp_path):
    rank_group(2)(offloads, policy_folder, tmp_path)


def judged(rank, folder):
    """Log-probabilities of a frozen policy and values of a critic, packed and not."""
    results = []
    batch = batch_of(rank, 4)
    for packing in (False, True):
        options = FSDPOptions(packing=packing, recompute=True)
        reference = frozen_policy(folder, device=CPU, options=options)
        critic = make_engine(folder, load=load_critic, options=options)
        with torch.no_grad():
            for parameter in critic.module.score.parameters():
                parameter.copy_(torch.ones_like(parameter))
        values = response_values(critic.module, batch)
        values.square().sum().backward()
        gradient = critic.module.model.layers[0].mlp.up_proj.weight.grad.full_tensor()
        with torch.no_grad():
            logprobs = response_logprobs(reference, batch, 0.7)
        results.append((logprobs, values.detach(), gradient))
    return results


def test_references_and_critics_are_packed_alike(rank_group, policy_folder):
    for plain, packed in rank_group(2)(judged, policy_folder):
        for tensor, other in zip(packed, plain, strict=True):
            largest = float(other.abs().max())
            assert largest > 0
            torch.testing.assert_close(tensor, other, rtol=0, atol=1e-4 * largest)


class Layers(nn.Module):
    """Layers whose tokens see all tokens of their row, whatever their positions are."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 5)

    def forward(self, input_ids, **_):
        values = self.embedding(input_ids)
        return SimpleNamespace(last_hidden_state=values + values.mean(dim=1, keepdim=True))


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_model = Layers()

    def forward(self, **inputs):
        return SimpleNamespace(logits=self.base_model(**inputs).last_hidden_state)


def test_models_that_mix_packed_samples_or_cannot_recompute_are_refused():
    model = Mixes()
    FSDPOptions(packing=True).prepare(model)
    with raises(PackingRefused, model="Mixes"):
        check_isolation(model, CPU)
    with raises(RecomputeRefused, model="Mixes"):
        FSDPOptions(recompute=True).prepare(model)
