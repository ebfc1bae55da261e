"""Probes of the trainer's ranks: of the weights as they are published, which stay as they are."""

from __future__ import annotations

import anyio.to_thread
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.tensors import identical  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from tests.support.weight_versions import ready  # noqa: E402
from tests.workers.trainer.test_published_dtype import (  # noqa: E402
    explorer_of,
    train_step,
    trained,
    upload,
    workers,
)
from trinity_events.weights.applying.verify_model import find_probes  # noqa: E402
from trinity_workers.learning.adapters import adapter_tree, policy_loader  # noqa: E402
from trinity_workers.learning.policy import load_policy  # noqa: E402
from trinity_workers.rollout_engines.proof import (  # noqa: E402
    PROBE_TOLERANCES,
    compare_logprobs,
)
from trinity_workers.trainer.probes import fixed_sequences  # noqa: E402


def pull(explorer, announced, model):
    """Fill a model with a version, and return its probes."""
    with explorer.pull(announced) as version:
        probes = find_probes(manifest for manifest, _ in version.parts)
        holders = [manifest.rank for manifest, _ in version.parts if manifest.probes is not None]
    explorer.apply(model, announced, cast=True)
    return probes, holders


@torch.no_grad()
def logprobs_of(model, sequences):
    tokens = torch.tensor(sequences)
    logprobs = model(input_ids=tokens).logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1).tolist()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("engine", "layout", "computed", "served", "form"),
    [
        ("fsdp", {}, "float32", "float32", "shards"),
        ("fsdp", {"tensor_parallel": 2}, "float32", "bfloat16", "snapshot"),
        ("fsdp", {"tensor_parallel": 2}, "bfloat16", "bfloat16", "full"),
        ("megatron", {"tensor_parallel": 2}, "float32", "bfloat16", "shards"),
        ("megatron", {"pipeline_parallel": 2}, "float32", "float32", "full"),
    ],
)
async def test_the_ranks_seal_the_log_probabilities_of_what_they_publish(
    rank_processes, make_config, log, engine, layout, computed, served, form
):
    if engine == "megatron":
        pytest.importorskip("megatron.core")
    config = make_config(
        trainer={"ranks": 2, "engine": engine, "warmup_steps": 0, **layout},
        model={"dtype": computed},
        sync={"publish": form, "probes": 3, "timeout": PATIENCE},
        explorer={"dtype": served},
        rollouts={"temperature": 0.7},
    )
    model, _ = load_policy(config.model_folder, "float32")
    async with workers(rank_processes, config) as ask:
        with explorer_of(config) as explorer:
            await ask(train_step, 1)
            before, *_ = await ask(trained)
            await ask(upload, 1)
            after, *_ = await ask(trained)
            event = await ready(log, 1)
            probes, holders = await anyio.to_thread.run_sync(pull, explorer, event, model)
            await ask(train_step, 2)
    assert all(identical(after[name], tensor) for name, tensor in before.items())
    assert (probes.count, probes.dtype, holders) == (3, computed, [0])
    largest, mean = compare_logprobs(
        probes.logprobs.to_rows(), logprobs_of(model, probes.sequences())
    )
    assert largest < PROBE_TOLERANCES[computed] / 2
    assert mean < PROBE_TOLERANCES[computed] / 20
    if computed == "float32":  # else rounding hides what is looked for here
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(before[_name_of(model, parameter)])
        unrounded, _ = compare_logprobs(
            probes.logprobs.to_rows(), logprobs_of(model, probes.sequences())
        )
        assert (unrounded > PROBE_TOLERANCES["float32"]) == (served == "bfloat16")


@pytest.mark.heavy
async def test_probes_of_adapters_are_of_the_policy_with_them(rank_processes, make_config, log):
    pytest.importorskip("peft")
    config = make_config(
        trainer={"ranks": 1, "warmup_steps": 0},
        model={"lora": {"rank": 4, "dropout": 0.5}},
        sync={"probes": 3, "timeout": PATIENCE},
    )
    model, _ = policy_loader(config.model.lora, config.seed)(config.model_folder, "float32")
    first = logprobs_of(model, fixed_sequences(model.config.vocab_size, count=3, length=48))
    async with workers(rank_processes, config) as ask:
        with explorer_of(config) as explorer:
            await ask(train_step, 1)
            await ask(upload, 1)
            event = await ready(log, 1)
            probes, holders = await anyio.to_thread.run_sync(
                pull, explorer, event, adapter_tree(model)
            )
    assert (probes.count, holders) == (3, [0])
    rows = probes.logprobs.to_rows()
    largest, _ = compare_logprobs(rows, logprobs_of(model.eval(), probes.sequences()))
    assert largest < PROBE_TOLERANCES["float32"] / 2, "without dropout"
    assert compare_logprobs(rows, first)[0] > PROBE_TOLERANCES["float32"], "adapters have learned"


def _name_of(model, parameter):
    return next(name for name, other in model.named_parameters() if other is parameter)


def test_sequences_follow_from_their_arguments():
    sequences = fixed_sequences(100, count=3, length=8)
    assert sequences == fixed_sequences(100, count=3, length=8)
    assert [len(sequence) for sequence in sequences] == [8, 8, 8]
    assert all(0 <= token < 100 for sequence in sequences for token in sequence)
