"""LoRA adapters on FSDP: what is trained, computed, saved and loaded, on two ranks over Gloo."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from transformers import AutoModelForCausalLM  # noqa: E402

from tests.support.batches import batch_of  # noqa: E402
from tests.support.experiences import make_groups  # noqa: E402
from tests.support.tensors import assert_equal, identical  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.conversion.convert import convert  # noqa: E402
from trinity_workers.engines.adapter_folder import (  # noqa: E402
    AdaptersRefused,
    write_adapter_folder,
)
from trinity_workers.engines.convertible import AdapterConversionRefused  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine, frozen_policy  # noqa: E402
from trinity_workers.engines.fsdp_options import FSDPOptions  # noqa: E402
from trinity_workers.engines.model_memory import ALL  # noqa: E402
from trinity_workers.engines.offload import Offload  # noqa: E402
from trinity_workers.engines.state_files import write_state  # noqa: E402
from trinity_workers.learning.adapters import policy_loader  # noqa: E402
from trinity_workers.learning.logprobs import response_logprobs, response_statistics  # noqa: E402
from trinity_workers.learning.lora_settings import LoraConfig  # noqa: E402
from trinity_workers.learning.policy import create_policy, load_policy  # noqa: E402
from trinity_workers.trainer.models.fsdp import AdaptedBase  # noqa: E402

CPU = torch.device("cpu")
RATE = 1e-2
LORA = LoraConfig(rank=4)
SEED = 3
TOKENS = torch.arange(3, 19)[None]


def make_engine(folder, lora=LORA, **settings):
    engine = FSDPEngine(
        folder, device=CPU, learning_rate=RATE, load=policy_loader(lora, SEED), **settings
    )
    engine.module.train()
    return engine


def train(rank, engine, seeds):
    """Steps on batches of these seeds; returns their losses and gradient norms."""
    metrics = []
    for seed in seeds:
        statistics = response_statistics(engine.module, batch_of(rank, seed))
        loss = -statistics.logprobs.sum() / 100
        metrics += [float(loss.detach()), engine.optimizer_step(loss)]
    return metrics


def logprobs(model, batch):
    with torch.no_grad():
        return response_logprobs(model, batch)


def full(tensors):
    return {name: tensor.clone() for name, tensor in tensors}


def base_of(engine):
    """The tensors that are not trained, in full."""
    engine.module.reshard()
    named = engine.module.named_parameters()
    return {
        name: parameter.full_tensor() for name, parameter in named if not parameter.requires_grad
    }


def trained(rank, folder, dtype, by_layers, at):
    """Train adapters, and return what they and their base were and came to."""
    options = FSDPOptions(shard_layers_from=0 if by_layers else 10_000_000)
    results: dict[str, Any] = {}
    engine = make_engine(folder, dtype=dtype, options=options)
    plain = frozen_policy(folder, device=CPU, dtype=dtype)
    batch = batch_of(rank, 9)
    reference = AdaptedBase(engine)
    expected = logprobs(plain, batch)
    # First of all: a parameter that FSDP finds frozen then would never have a gradient.
    assert identical(logprobs(reference, batch), expected)
    results["before"] = full(engine.get_per_tensor_param())
    bases = base_of(engine)
    results["base_dtypes"] = {tensor.dtype for tensor in bases.values()}
    metrics = train(rank, engine, (1, 2))
    results["after"] = full(engine.get_per_tensor_param())
    results["dtypes"] = {tensor.dtype for tensor in results["after"].values()}
    assert {tensor.dtype for _, tensor in engine.master_params()} == {torch.float32}
    assert not identical(logprobs(engine.module, batch), expected)
    assert identical(logprobs(reference, batch), expected), "the reference does not move"
    assert_equal(base_of(engine), bases)
    assert len(engine.optimizer.state) == len(results["after"]), "none for the base"
    engine.save_checkpoint(str(at))
    metrics += train(rank, engine, (3, 4))
    away = Offload(param_offload=True, grad_offload=True, optimizer_offload=True)
    again = make_engine(folder, dtype=dtype, options=options, offload=away)
    with again.resident(*ALL):
        train(rank, again, (7,))  # what was gathered of these values must be forgotten
    again.load_checkpoint(str(at))
    with again.resident(*ALL):
        assert train(rank, again, (3, 4)) == metrics[4:]
    assert_equal(full(again.master_params()), full(engine.master_params()))
    results["metrics"], results["last"] = metrics, full(engine.master_params())
    return results


@pytest.mark.parametrize(
    ("dtype", "by_layers"), [("float32", False), ("float32", True), ("bfloat16", True)]
)
def test_adapters_alone_are_trained_saved_and_resumed_to_the_bit(
    rank_group, policy_folder, tmp_path, dtype, by_layers
):
    result, other = rank_group(2)(trained, policy_folder, dtype, by_layers, tmp_path)
    assert_equal(result["last"], other["last"])
    assert result["metrics"][1::2] == other["metrics"][1::2], "gradient norms are of all ranks"
    served = getattr(torch, dtype)
    assert result["dtypes"] == result["base_dtypes"] == {served}, "no base in float32"
    assert len(result["after"]) == 2 * 2 * 7, "two matrices for each linear layer"
    assert all(name.startswith("base_model.model.model.layers.") for name in result["after"])
    for name, tensor in result["after"].items():
        if "lora_B" in name:
            assert not result["before"][name].any()
        assert not identical(tensor, result["before"][name]), name
    files = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in files if "rank_0" in name] == [
        "adapter_world_size_2_rank_0.pt",
        "optim_world_size_2_rank_0.pt",
    ]
    saved = sum((tmp_path / name).stat().st_size for name in files if name.endswith(".pt"))
    whole = (policy_folder / "model.safetensors").stat().st_size
    assert saved < whole, "adapters and their optimizer, and nothing of the base"


def first_gradients(rank, folder, options):
    engine = make_engine(folder, options=options)
    with torch.no_grad():  # else the first matrices have no gradient
        for name, parameter in engine.adapters.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.02)
    statistics = response_statistics(engine.module, batch_of(rank, 1))
    engine.accumulate(-statistics.logprobs.sum() / 100, first=True, last=True)
    named = engine.adapters.named_parameters()
    return {name: parameter.grad.full_tensor() for name, parameter in named}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "options", [FSDPOptions(), FSDPOptions(recompute=True, packing=True, cpu_offload=True)]
)
def test_gradients_are_those_of_peft_in_one_process(rank_group, policy_folder, options):
    made, _ = rank_group(2)(first_gradients, policy_folder, options)
    model, _ = load_policy(policy_folder)
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    expected = peft.get_peft_model(model, settings)
    own, _ = policy_loader(LORA, SEED)(policy_folder, "float32")
    start = {name: parameter.detach() for name, parameter in own.named_parameters()}
    total = 0.0
    for name, tensor in expected.named_parameters():
        tensor.data.copy_(start[name.removeprefix("base_model.model.")])
        if "lora_B" in name:
            tensor.data.fill_(0.02)
    for number in range(2):
        batch = collate(make_groups("r", 1)[number::2], 0)
        total = total - response_logprobs(expected, batch).sum() / 100 / 2
    torch.autograd.backward(total)
    grads = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in expected.named_parameters()
        if parameter.requires_grad
    }
    assert sorted(made) == sorted(grads)
    largest = max(float(gradient.abs().max()) for gradient in grads.values())
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, grads[name], rtol=0, atol=1e-5 * largest)


def refusals(rank, folder, other, at):
    """Sentences of checkpoints that are not of these adapters."""
    del rank
    make_engine(folder).save_checkpoint(str(at))
    errors = []
    full_policy = FSDPEngine(folder, device=CPU, learning_rate=RATE)
    for engine in (
        full_policy,
        make_engine(folder, LoraConfig(rank=2)),
        make_engine(folder, LoraConfig(rank=4, target_modules=("q_proj",))),
        make_engine(other),
    ):
        try:
            engine.load_checkpoint(str(at))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    full_policy.save_checkpoint(str(at / "full"))
    try:
        make_engine(folder).load_checkpoint(str(at / "full"))
    except AdaptersRefused as error:
        errors.append(str(error))
    return errors


def test_checkpoints_of_other_adapters_or_of_another_base_are_refused_in_a_sentence(
    rank_group, policy_folder, tmp_path
):
    other = tmp_path / "other"
    create_policy(other, seed=8)
    [errors] = rank_group(1)(refusals, policy_folder, other, tmp_path / "saved")
    own, rank, targets, base, none = errors
    assert "has adapters, and the run trains the policy itself: set model.lora as it was" in own
    assert "another model.lora.rank than the run" in rank
    assert "another model.lora.target_modules than the run" in targets
    assert (
        f"were trained on the weights of {policy_folder}, and those of {other} are others" in base
    )
    assert "has no adapter_config.json, and the run trains adapters" in none
    described = json.loads((tmp_path / "saved" / "huggingface" / "base_model.json").read_bytes())
    assert Path(described["path"]) == policy_folder


def world_of_one(rank, folder, at):
    engine = make_engine(folder)
    engine.load_checkpoint(str(at))
    return full(engine.master_params()), engine.steps


def save(rank, folder, at):
    """Save adapters after a step; return them, and the logits that they make."""
    engine = make_engine(folder)
    train(rank, engine, (1,))
    engine.save_checkpoint(str(at))
    # As the method `checkpoint` saves: the model is a folder of PEFT, beside the training state.
    files = at.with_name("files")
    tensors = engine.master_params()
    if rank.number == 0:
        write_adapter_folder(files / "huggingface", engine.write_description, tensors)
    else:
        list(tensors)
    [(path, state)] = engine.training_files(files).items()
    write_state(path, state)
    engine.module.eval()
    with torch.no_grad():
        logits = engine.module(input_ids=TOKENS).logits
    return full(engine.master_params()), logits


def test_adapters_load_at_another_number_of_ranks(rank_group, policy_folder, tmp_path):
    (saved, _), _ = rank_group(2)(save, policy_folder, tmp_path / "shards")
    group = rank_group(1)
    for folder in ("shards", "files"):
        [(loaded, steps)] = group(world_of_one, policy_folder, tmp_path / folder)
        assert_equal(loaded, saved)
        assert steps == 1
    names = {path.name for path in (tmp_path / "files" / "huggingface").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "XXH128SUMS"} <= names
    assert "config.json" not in names, "transformers would take it for a whole model"


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_checkpoints_of_adapters_convert_to_what_transformers_and_peft_load(
    rank_group, policy_folder, tmp_path
):
    step = tmp_path / "global_step_1"
    (saved, logits), _ = rank_group(2)(save, policy_folder, step / "actor")
    alone = convert(step, tmp_path / "alone", adapter=True)
    assert (alone.to, alone.tensors) == ("adapter", len(saved))
    assert alone.bytes == sum(tensor.nbytes for tensor in saved.values())
    base = AutoModelForCausalLM.from_pretrained(policy_folder)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "alone")
    assert identical(logits_of(adapted), logits)
    by_name = AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
    assert identical(logits_of(by_name), logits), "transformers finds the base by its path"

    done = convert(step, tmp_path / "merged")
    assert done.to == "huggingface"
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    model, tokenizer = load_policy(tmp_path / "merged")
    assert_equal(
        dict(sorted(model.named_parameters())),
        dict(sorted(adapted.merge_and_unload().named_parameters())),
    )
    assert len(tokenizer) == len(load_policy(policy_folder)[1])
    torch.testing.assert_close(logits_of(model), logits, rtol=0, atol=1e-4)
    assert not torch.allclose(logits_of(load_policy(policy_folder)[0]), logits, atol=1e-2)
    # From the folder of PEFT as from the shards, and with a base that has moved.
    moved = tmp_path / "moved"
    shutil.copytree(policy_folder, moved)
    convert(tmp_path / "alone", tmp_path / "again", base=moved)
    assert identical(logits_of(load_policy(tmp_path / "again")[0]), logits_of(model))

    other = tmp_path / "other"
    create_policy(other, seed=8)
    with raises(AdaptersRefused, fault="given", base=str(other)):
        convert(step, tmp_path / "wrong", base=other)
    with raises(AdapterConversionRefused, fault="base", folder=tmp_path / "nowhere"):
        convert(step, tmp_path / "wrong", base=tmp_path / "nowhere")
    with raises(AdapterConversionRefused, fault="no adapters", folder=policy_folder):
        convert(policy_folder, tmp_path / "wrong", adapter=True)
    assert not (tmp_path / "wrong").exists()
