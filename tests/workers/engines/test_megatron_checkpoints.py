"""Megatron's distributed checkpoints: written at one layout, loaded at another."""

from __future__ import annotations

import copy
import random

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch.distributed as dist  # noqa: E402

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.errors import assert_attributes  # noqa: E402
from trinity_events.checkpoints.layout import MANIFEST  # noqa: E402
from trinity_workers.engines.adamw import AdamWOptions  # noqa: E402
from trinity_workers.engines.base import per_tensor_params  # noqa: E402
from trinity_workers.engines.learning_rate import LearningRate  # noqa: E402
from trinity_workers.engines.megatron import (  # noqa: E402
    OptimizerOptions,
    ParallelLayout,
    rank_state,
)
from trinity_workers.engines.megatron.checkpoint_errors import (  # noqa: E402
    ForeignCheckpoint,
    OtherOptimizer,
)
from trinity_workers.engines.model_folder import write_model_folder  # noqa: E402
from trinity_workers.helpers.megatron import only  # noqa: E402

pytestmark = pytest.mark.megatron

ONE = ParallelLayout()
TENSOR = ParallelLayout(tensor=2)
PIPELINE = ParallelLayout(pipeline=2)
BOTH = ParallelLayout(tensor=2, pipeline=2)

TRAINED = OptimizerOptions(learning_rate=3e-3)
RAMPED = OptimizerOptions(learning_rate=LearningRate(highest=3e-3, warmup_steps=8))
DISTRIBUTED = OptimizerOptions(learning_rate=3e-3, distributed=True)


def batches(count: int):
    return [at.padded_batch(step % 4, rows=8) for step in range(count)]


def save(rank, folder):
    rank.objects.engine.save_checkpoint(str(folder))


def load(rank, folder):
    rank.objects.engine.load_checkpoint(str(folder))


def test_a_checkpoint_keeps_the_defaults_of_generation(engine_ranks, megatron_folder, tmp_path):
    engine_ranks("qwen3", 2, TENSOR)(save, tmp_path)
    [saved, given] = [
        (folder / "generation_config.json").read_bytes()
        for folder in (tmp_path / "huggingface", megatron_folder("qwen3"))
    ]
    assert saved == given


def save_model(rank, folder):
    rank.objects.engine.checkpoint_manager.checkpoint_save_contents = ["model"]
    save(rank, folder)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_step_after_a_load_of_the_model_alone_begins_with_the_loaded_weights(
    engine_ranks, tmp_path, distributed
):
    # A rate of 0, so that a step writes back the optimizer's float32 copies as they are.
    rests = OptimizerOptions(learning_rate=0.0, distributed=distributed)
    options = {"dtype": torch.bfloat16}
    ranks = engine_ranks("qwen3", 2, ONE, TRAINED, options)
    ranks(at.train, batches(1))
    ranks(save_model, tmp_path / "checkpoint")
    expected = ranks(at.full_weights)[0]
    ranks = engine_ranks("qwen3", 2, ONE, rests, options)
    ranks(load, tmp_path / "checkpoint")
    ranks(at.train, batches(1))
    at.assert_same(ranks(at.full_weights)[0], expected)


def rate_of_a_step(rank):
    """Train a step; return the learning rate with which it was taken."""
    at.train(rank, batches(1))
    [rate] = {group["lr"] for group in rank.objects.engine.optimizer.param_groups}
    return rate


def test_a_resumed_engine_trains_with_the_learning_rate_of_its_configuration(
    engine_ranks, tmp_path
):
    ranks = engine_ranks("qwen3", 1, ONE, TRAINED)
    ranks(at.train, batches(2))
    ranks(save, tmp_path / "checkpoint")
    later = LearningRate(highest=1e-5, schedule="linear", steps=12)
    ranks = engine_ranks("qwen3", 1, ONE, OptimizerOptions(learning_rate=later))
    ranks(load, tmp_path / "checkpoint")
    assert ranks(rate_of_a_step) == [later.at(2)]


def options_of_groups(rank):
    """Return weight decay, both decays and epsilon of the groups of parameters."""
    groups = rank.objects.engine.optimizer.param_groups
    return {(group["weight_decay"], *group["betas"], group["eps"]) for group in groups}


def test_an_engine_has_the_options_of_its_configuration_also_after_a_load(engine_ranks, tmp_path):
    ranks = engine_ranks("qwen3", 1, ONE, TRAINED)
    assert ranks(options_of_groups) == [{(0.01, 0.9, 0.99, 1e-8)}]
    ranks(at.train, batches(1))
    ranks(save, tmp_path / "checkpoint")
    adamw = AdamWOptions(weight_decay=0.2, beta1=0.8, beta2=0.95, epsilon=1e-5)
    later = OptimizerOptions(learning_rate=3e-3, adamw=adamw)
    ranks = engine_ranks("qwen3", 1, ONE, later)
    configured = ranks(options_of_groups)
    assert configured == [{(0.2, 0.8, 0.95, 1e-5)}]
    ranks(load, tmp_path / "checkpoint")
    assert ranks(options_of_groups) == configured


def optimizer_state(rank):
    """The optimizer's state by kind and tensor, gathered from all ranks, and its steps."""
    engine = rank.objects.engine
    optimizers = engine.optimizer.chained_optimizers
    states = {}
    for optimizer in optimizers:
        states |= optimizer.optimizer.state
    state_of = spread_state if engine._optimizer_options.distributed else whole_state
    stream = copy.copy(engine._stream)
    stream.entries = [msgspec.structs.replace(entry, dtype="float32") for entry in stream.entries]
    own = [dict(chunk.named_parameters()) for chunk in engine._chunks]
    tensors = {}
    for kind in ("exp_avg", "exp_avg_sq", "master"):
        stream._parameters = [
            {name: state_of(optimizers, parameter, kind) for name, parameter in chunk.items()}
            for chunk in own
        ]
        tensors |= {f"{kind} of {name}": value.clone() for name, value in stream}
    return tensors, {float(state["step"]) for state in states.values()}


def whole_state(optimizers, parameter, kind):
    """The ordinary optimizer's state of a parameter."""
    main = getattr(parameter, "main_param", None)  # where the parameter is none in float32
    main = parameter if main is None else main
    if kind == "master":
        return main
    [state] = [own.optimizer.state for own in optimizers if main in own.optimizer.state]
    return state[main][kind]


def spread_state(optimizers, parameter, kind):
    """The distributed optimizer's state of a parameter, from the shards of all replicas."""
    [optimizer] = [
        own
        for own in optimizers
        if any(parameter in buffer.param_index_map for buffer in own.buffers)
    ]
    whole = torch.zeros(parameter.numel())
    if parameter in optimizer.model_param_group_index_map:
        group, place = optimizer.model_param_group_index_map[parameter]
        shard = optimizer.optimizer.param_groups[group]["params"][place]
        own = optimizer._get_model_param_range_map(parameter)["param"]
        whole[own.start : own.end] = (
            shard if kind == "master" else optimizer.optimizer.state[shard][kind]
        )
    dist.all_reduce(whole, group=optimizer.data_parallel_group)
    return whole.view(parameter.shape)


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "options"),
    [
        pytest.param((2, TENSOR), (1, ONE), {}, marks=pytest.mark.nightly),
        ((2, PIPELINE), (2, TENSOR), {}),
        pytest.param(
            *((2, TENSOR), (2, PIPELINE), {"dtype": torch.bfloat16}), marks=pytest.mark.nightly
        ),
        ((4, BOTH), (2, TENSOR), {"dtype": torch.bfloat16}),
    ],
)
def test_the_optimizers_state_is_the_same_tensor_by_tensor_at_another_layout(
    engine_ranks, tmp_path, saved_at, loaded_at, options
):
    ranks = engine_ranks("qwen3", *saved_at, TRAINED, options)
    ranks(at.train, batches(3))
    ranks(save, tmp_path / "checkpoint")
    expected, steps = ranks(optimizer_state)[0]
    assert steps == {3.0}
    assert any(
        tensor.abs().max() > 1e-4 for name, tensor in expected.items() if "exp_avg of" in name
    )

    ranks = engine_ranks("qwen3", *loaded_at, TRAINED, options, load_weights=False)
    ranks(load, tmp_path / "checkpoint")
    for state, steps in ranks(optimizer_state):
        assert steps == {3.0}
        assert sorted(state) == sorted(expected)
        for name, value in state.items():
            assert value.dtype is torch.float32, name
            # Of the value: squares of gradients are far below 1e-5 themselves.
            torch.testing.assert_close(value, expected[name], atol=0, rtol=1e-5)


def train_further(ranks, count: int) -> list[float]:
    """The losses of steps from here on, and none of the stages that have none."""
    return next(losses for losses in ranks(at.train, batches(count)) if any(losses))


def test_bfloat16_with_float32_masters_goes_on_to_the_bit_at_its_layout(engine_ranks, tmp_path):
    bfloat16 = {"dtype": torch.bfloat16, "recompute": True}
    ranks = engine_ranks("qwen3", 2, TENSOR, TRAINED, bfloat16)
    ranks(at.train, batches(2))
    ranks(save, tmp_path / "checkpoint")
    losses = train_further(ranks, 2)
    expected, _ = ranks(optimizer_state)[0]

    ranks = engine_ranks("qwen3", 2, TENSOR, TRAINED, bfloat16, load_weights=False)
    ranks(load, tmp_path / "checkpoint")
    assert train_further(ranks, 2) == losses
    state, _ = ranks(optimizer_state)[0]
    at.assert_same(state, expected)


@pytest.mark.parametrize(
    ("saved_at", "loaded_at"),
    [
        pytest.param((2, TENSOR), (2, TENSOR), marks=pytest.mark.nightly),
        pytest.param((2, TENSOR), (1, ONE), marks=pytest.mark.nightly),
        ((2, TENSOR), (2, PIPELINE)),
        ((2, PIPELINE), (4, BOTH)),
        pytest.param((4, BOTH), (1, ONE), marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_of_one_layout_goes_on_at_another_as_if_nothing_had_been(
    engine_ranks, tmp_path, saved_at, loaded_at
):
    ranks = engine_ranks("qwen3", *saved_at, TRAINED)
    ranks(at.train, batches(3))
    ranks(save, tmp_path / "checkpoint")
    weights = ranks(at.full_weights)[0]
    expected = train_further(ranks, 3)

    ranks = engine_ranks("qwen3", *loaded_at, TRAINED, load_weights=False)
    ranks(load, tmp_path / "checkpoint")
    for loaded_weights in ranks(at.full_weights):
        at.assert_same(loaded_weights, weights)
    # The losses tell of the optimizer's state: without it they are others from the second step.
    assert train_further(ranks, 3) == pytest.approx(expected, abs=1e-5)


def test_what_is_not_loaded_with_the_model_makes_a_difference(engine_ranks, tmp_path):
    ranks = engine_ranks("qwen3", 2, TENSOR, TRAINED)
    ranks(at.train, batches(3))
    ranks(save, tmp_path / "checkpoint")
    expected = train_further(ranks, 3)
    ranks(load_model_alone, tmp_path / "checkpoint")
    assert train_further(ranks, 3) != pytest.approx(expected, abs=1e-5)


def load_model_alone(rank, folder):
    optimizer, rank.objects.engine.optimizer = rank.objects.engine.optimizer, None
    load(rank, folder)
    rank.objects.engine.optimizer = optimizer


def save_after_more_steps(rank, folder, more):
    """Prepare a checkpoint, take further steps and write it then; their losses."""
    writes = rank.objects.engine.prepare_checkpoint(str(folder))
    assert not folder.exists()
    losses = at.train(rank, more)
    for write in writes.values():
        write()
    return losses, {part: write.nbytes for part, write in writes.items()}


def test_a_checkpoint_holds_what_was_there_when_it_was_prepared(engine_ranks, tmp_path):
    ranks = engine_ranks("qwen3", 2, TENSOR, RAMPED)
    ranks(at.train, batches(2))
    weights = ranks(at.full_weights)[0]
    saved = ranks(save_after_more_steps, tmp_path / "checkpoint", batches(3))
    losses, planned_bytes = zip(*saved, strict=True)
    for part, nbytes in planned_bytes[0].items():
        files = (tmp_path / "checkpoint" / part).rglob("*")
        written = sum(file.stat().st_size for file in files if file.is_file())
        assert nbytes <= written < 1.5 * nbytes + 100_000, (part, nbytes, written)
    ranks = engine_ranks("qwen3", 2, TENSOR, RAMPED, load_weights=False)
    ranks(load, tmp_path / "checkpoint")
    at.assert_same(ranks(at.full_weights)[0], weights)
    for rank_losses, expected in zip(ranks(at.train, batches(3)), losses, strict=True):
        assert rank_losses == pytest.approx(expected, abs=1e-5)


def test_a_checkpoint_that_was_not_finished_is_refused_on_every_rank(engine_ranks, tmp_path):
    ranks = engine_ranks("qwen3", 2, TENSOR)
    ranks(save, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model" / "metadata.json").unlink()
    (tmp_path / "checkpoint" / MANIFEST).unlink()  # which is written after all other files
    for error in ranks.answers(load, tmp_path / "checkpoint"):
        assert isinstance(error, ForeignCheckpoint)
        assert error.fault == "incomplete"


def test_experts_that_were_spread_load_on_one_rank(engine_ranks, tmp_path):
    ranks = engine_ranks("qwen2-moe", 2, ParallelLayout(expert=2))
    ranks(save, tmp_path / "checkpoint")
    weights = ranks(at.full_weights)[0]
    ranks = engine_ranks("qwen2-moe", 1, ONE, load_weights=False)
    ranks(load, tmp_path / "checkpoint")
    at.assert_same(ranks(at.full_weights)[0], weights)


# --- the distributed optimizer ------------------------------------------------------------------

SEQUENCE = ParallelLayout(tensor=2, sequence_parallel=True)
CONTEXT = ParallelLayout(context=2)
EXPERTS = ParallelLayout(expert=2)
VIRTUAL = ParallelLayout(pipeline=2, virtual=2)
BFLOAT16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "world", "layout", "options"),
    [
        ("qwen3", 2, ONE, {}),
        # The embedding is tied: the last stage's buffer has two buckets, with padding between them.
        ("qwen3", 4, PIPELINE, BFLOAT16),
        ("qwen2-moe", 2, EXPERTS, {}),
        pytest.param("qwen3", 2, ONE, BFLOAT16, marks=pytest.mark.nightly),
        pytest.param("qwen3", 4, PIPELINE, {}, marks=pytest.mark.nightly),
        pytest.param("qwen3", 4, TENSOR, {}, marks=pytest.mark.nightly),
        pytest.param("qwen2-moe", 2, EXPERTS, BFLOAT16, marks=pytest.mark.nightly),
        pytest.param(
            *("qwen2-moe", 4),
            ParallelLayout(tensor=2, context=2, expert=2, sequence_parallel=True),
            {},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_distributed_optimizer_goes_on_to_the_bit_at_its_layout(
    engine_ranks, tmp_path, name, world, layout, options
):
    ranks = engine_ranks(name, world, layout, DISTRIBUTED, options)
    ranks(at.train, batches(2))
    saved = ranks(optimizer_state)
    ranks(save, tmp_path / "checkpoint")
    assert ranks(optimizer_state)[0][1] == {2.0}, "a save changes nothing"
    losses = train_further(ranks, 2)
    expected, steps = ranks(optimizer_state)[0]
    assert steps == {4.0}
    weights = ranks(at.full_weights)

    ranks = engine_ranks(name, world, layout, DISTRIBUTED, options, load_weights=False)
    ranks(load, tmp_path / "checkpoint")
    for (state, steps), (before, _) in zip(ranks(optimizer_state), saved, strict=True):
        at.assert_same(state, before)
        assert steps == {2.0}
    assert train_further(ranks, 2) == losses
    for state, steps in ranks(optimizer_state):
        at.assert_same(state, expected)
        assert steps == {4.0}, "each step counted once"
    for mine, theirs in zip(ranks(at.full_weights), weights, strict=True):
        at.assert_same(mine, theirs)


@pytest.mark.parametrize(
    ("name", "saved_at", "loaded_at", "options"),
    [
        ("qwen3", (2, ONE), (1, ONE), {}),
        ("qwen3", (4, PIPELINE), (2, CONTEXT), {}),
        ("qwen3", (2, SEQUENCE), (4, ONE), BFLOAT16),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("qwen3", (2, ONE), (4, ONE), {}),
                ("qwen3", (2, ONE), (4, ONE), BFLOAT16),
                ("qwen3", (4, TENSOR), (2, PIPELINE), {}),
                ("qwen3", (4, CONTEXT), (4, SEQUENCE), {}),
                ("qwen3", (4, PIPELINE), (1, ONE), {}),
                ("qwen3-deep", (4, VIRTUAL), (2, ONE), {}),
                ("qwen2-moe", (4, EXPERTS), (2, EXPERTS), {}),
                (
                    "qwen2-moe",
                    (4, ParallelLayout(tensor=2, expert=2, sequence_parallel=True)),
                    (4, ParallelLayout(context=2, expert=4)),
                    {},
                ),
            ]
        ),
    ],
)
def test_a_distributed_optimizer_goes_on_at_another_layout(
    engine_ranks, tmp_path, name, saved_at, loaded_at, options
):
    ranks = engine_ranks(name, *saved_at, DISTRIBUTED, options)
    ranks(at.train, batches(3))
    ranks(save, tmp_path / "checkpoint")
    saved, _ = ranks(optimizer_state)[0]
    assert any(tensor.abs().max() > 1e-4 for key, tensor in saved.items() if "exp_avg of" in key)
    train_further(ranks, 2)
    expected = ranks(at.full_weights)[0]

    ranks = engine_ranks(name, *loaded_at, DISTRIBUTED, options, load_weights=False)
    ranks(load, tmp_path / "checkpoint")
    for state, steps in ranks(optimizer_state):
        assert steps == {3.0}
        at.assert_same(state, saved)
    train_further(ranks, 2)
    # bfloat16 gradients are rounded after another sum, and the weights after that.
    tolerance = 8e-3 if options else 1e-6
    for weights in ranks(at.full_weights):
        for key, value in weights.items():
            if not key.endswith("k_proj.bias"):  # its gradient is 0: AdamW follows the rounding
                torch.testing.assert_close(value, expected[key], atol=tolerance, rtol=0)


def test_a_distributed_optimizer_is_saved_before_its_first_step(engine_ranks, tmp_path):
    ranks = engine_ranks("qwen3", 2, ONE, DISTRIBUTED)
    ranks(save, tmp_path / "checkpoint")
    losses = train_further(ranks, 2)
    expected, _ = ranks(optimizer_state)[0]
    ranks = engine_ranks("qwen3", 2, ONE, DISTRIBUTED)
    ranks(at.train, batches(1))
    ranks(load, tmp_path / "checkpoint")
    assert train_further(ranks, 2) == losses
    state, steps = ranks(optimizer_state)[0]
    at.assert_same(state, expected)
    assert steps == {2.0}


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "attributes"),
    [
        ((ONE, DISTRIBUTED), (ONE, TRAINED), {"fault": "distributed", "saved": True}),
        ((ONE, TRAINED), (TENSOR, DISTRIBUTED), {"fault": "distributed", "saved": False}),
        ((EXPERTS, TRAINED), (ONE, TRAINED), {"fault": "experts", "saved": True}),
        ((ONE, DISTRIBUTED), (EXPERTS, DISTRIBUTED), {"fault": "experts", "saved": False}),
    ],
)
def test_the_state_of_another_kind_of_optimizer_is_refused_on_every_rank(
    engine_ranks, tmp_path, saved_at, loaded_at, attributes
):
    spreads = EXPERTS in (saved_at[0], loaded_at[0])
    name = "qwen2-moe" if spreads else "qwen3"
    engine_ranks(name, 2, *saved_at)(save, tmp_path / "checkpoint")
    ranks = engine_ranks(name, 2, *loaded_at)
    weights = ranks(at.full_weights)
    for error in ranks.answers(load, tmp_path / "checkpoint"):
        assert isinstance(error, OtherOptimizer)
        assert_attributes(error, folder=tmp_path / "checkpoint" / "training", **attributes)
    for mine, theirs in zip(ranks(at.full_weights), weights, strict=True):
        at.assert_same(mine, theirs)


# --- random states ----------------------------------------------------------------------------


def seed_all(rank, seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw(rank):
    """Draw from each generator of the rank."""
    return random.random(), np.random.random(), torch.rand(2).tolist()


def test_every_rank_goes_on_with_its_random_states_at_the_same_layout(engine_ranks, tmp_path):
    ranks = engine_ranks("qwen3", 2, TENSOR, TRAINED)
    ranks(at.train, batches(1))
    for number in range(2):
        ranks(seed_one, number, 11 + number)
    ranks(save, tmp_path / "checkpoint")
    expected = ranks(draw)
    assert expected[0] != expected[1]

    ranks = engine_ranks("qwen3", 2, TENSOR, TRAINED, load_weights=False)
    ranks(seed_all, 5)
    ranks(load, tmp_path / "checkpoint")
    assert ranks(draw) == expected


def seed_one(rank, number, seed):
    if rank.number == number:
        seed_all(rank, seed)


@pytest.mark.parametrize(
    ("world", "layout"), [(2, PIPELINE), pytest.param(1, ONE, marks=pytest.mark.nightly)]
)
def test_at_another_layout_every_rank_keeps_its_own_random_states(
    engine_ranks, tmp_path, world, layout
):
    ranks = engine_ranks("qwen3", 2, TENSOR, TRAINED)
    ranks(at.train, batches(1))
    ranks(seed_all, 11)
    ranks(save, tmp_path / "checkpoint")

    ranks = engine_ranks("qwen3", world, layout, TRAINED, load_weights=False)
    ranks(seed_all, 5)
    expected = ranks(draw)
    ranks(seed_all, 5)
    ranks(load, tmp_path / "checkpoint")
    assert ranks(draw) == expected


class Tracked:
    """Tracker of a GPU's generators, as megatron-core has it."""

    def __init__(self):
        self.states = {"model-parallel-rng": torch.arange(4, dtype=torch.uint8)}
        self.states["captured"] = torch.Generator().manual_seed(3)

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = states


def track(rank, given):
    rank.objects.tracker = Tracked()
    if given:
        rank.objects.tracker.states["model-parallel-rng"] = torch.zeros(4, dtype=torch.uint8)
        rank.objects.tracker.states["captured"].manual_seed(4)
    patch = pytest.MonkeyPatch()
    patch.setattr(rank_state, "_tracker", lambda: rank.objects.tracker)
    rank.exits.callback(patch.undo)


def tracked(rank):
    states = rank.objects.tracker.states
    return states["model-parallel-rng"].tolist(), torch.rand(1, generator=states["captured"]).item()


def test_the_tracker_of_cudas_generators_gets_its_states_back(engine_ranks, tmp_path):
    ranks = engine_ranks("qwen3", 1, ONE, TRAINED)
    ranks(at.train, batches(1))
    ranks(track, False)
    ranks(save, tmp_path / "checkpoint")
    expected = ranks(tracked)
    ranks(track, True)
    assert ranks(tracked) != expected
    ranks(track, True)
    ranks(load, tmp_path / "checkpoint")
    assert ranks(tracked) == expected


def save_in_huggingfaces_format(rank, folder):
    """Save a checkpoint whose model is a Hugging Face folder, as a version in files is."""
    engine = rank.objects.engine
    with only(engine, ["optimizer", "extra"]):
        for write in engine.prepare_checkpoint(str(folder), copy=False).values():
            write()
    tensors = per_tensor_params(engine)
    if rank.number == 0:
        write_model_folder(folder / "huggingface", engine.write_description, tensors)
    else:
        list(tensors)


def test_a_checkpoint_whose_model_is_a_hugging_face_folder_loads_bit_for_bit(
    engine_ranks, tmp_path
):
    ranks = engine_ranks("qwen3", 2, TENSOR, TRAINED)
    ranks(at.train, batches(2))
    ranks(save_in_huggingfaces_format, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"training", "huggingface"}
    expected = ranks(at.full_weights)[0]
    ranks = engine_ranks("qwen3", 2, PIPELINE, TRAINED)
    ranks(load, tmp_path)
    for weights in ranks(at.full_weights):
        at.assert_same(weights, expected)
    ranks(at.train, batches(1))
