"""LoRA adapters of a policy, through PEFT: the layers, and a tree of their tensors.

PEFT replaces linear layers of the model by layers that hold both: the frozen base, and two small
matrices. The tree has these matrices alone, under the names that PEFT's files have. It is what is
trained, published, installed and saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from trinity_events.errors import PackageMissing

from .lora_settings import ALL_LINEAR, LoraConfig
from .policy import isolated_rng, load_policy
from .pretrained import AdapterTargetRefused

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Loaded: TypeAlias = "tuple[PreTrainedModel, PreTrainedTokenizerBase]"

_ADAPTER = "default"
_PREFIX = "base_model.model."
"""Prefix of all names in PEFT's files."""
_PLACES = ("lora_A", "lora_B")


def require_peft() -> Any:
    """Import and return PEFT. Raises PackageMissing."""
    try:
        import peft
    except ImportError:
        raise PackageMissing("model.lora", "peft", "trinity-events[lora]") from None
    return peft


def check_adapters(lora: LoraConfig, folder: Path | None) -> None:
    """Check that adapters can be made, without reading weights.

    Args:
        lora: Settings of the adapters.
        folder: Folder of the policy, if it is there.

    Raises:
        PackageMissing: if PEFT is not installed.
        BadPolicy: as :func:`add_adapters`.
    """
    require_peft()
    if folder is None:
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    make: Any = AutoModelForCausalLM  # its methods have no annotations
    # The names and classes of layers are enough, and cost no memory for weights.
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = make.from_config(config, trust_remote_code=False)
    _targets(model, lora, folder)


def policy_loader(lora: LoraConfig, seed: int) -> Callable[[Path, str], Loaded]:
    """Return the function that loads a policy from a folder in a dtype, with its adapters if any.

    Args:
        lora: Settings of the adapters.
        seed: Seed of the adapters' first values, the same on all ranks.
    """
    return partial(_load_adapted, lora=lora, seed=seed) if lora.rank else load_policy


def _load_adapted(folder: Path, dtype: str, *, lora: LoraConfig, seed: int) -> Loaded:
    model, tokenizer = load_policy(folder, dtype)
    add_adapters(model, lora, seed, base=folder)
    return model, tokenizer


def add_adapters(model: PreTrainedModel, lora: LoraConfig, seed: int, *, base: Path) -> None:
    """Give layers of a model adapters, in place, and freeze all else.

    The product of new adapters is 0: the model computes what it did.

    Args:
        model: The model.
        lora: Settings of the adapters.
        seed: Seed of their first values.
        base: Folder of the model, which is named next to saved adapters.

    Raises:
        PackageMissing: if PEFT is not installed.
        BadPolicy: if the model has no such layers, or a layer cannot have an adapter.
    """
    peft = require_peft()
    layers = _targets(model, lora, base)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
        r=lora.rank,
        lora_alpha=lora.scaled_alpha,
        lora_dropout=lora.dropout,
        target_modules=layers if ALL_LINEAR in lora.target_modules else [*lora.target_modules],
    )
    with isolated_rng(seed):
        peft.inject_adapter_in_model(settings, model, _ADAPTER)
    dtype = model.dtype
    for name, parameter in model.named_parameters():
        trained = _is_adapters(name)
        parameter.requires_grad_(trained)
        if trained:
            parameter.data = parameter.data.to(dtype)  # PEFT makes them float32 in any case
    # PEFT's new layers begin in training mode, whose dropout an evaluated model must not have.
    model.train(model.training)


def _targets(model: PreTrainedModel, lora: LoraConfig, base: Path) -> list[str]:
    """Return the names of the layers that are to have adapters, each of which can have one."""
    untyped: Any = model
    head = untyped.get_output_embeddings()
    layers, missing = list[str](), {*lora.target_modules}
    for name, layer in model.named_modules():
        # Exactly this class: merged() is right for plain weights alone.
        is_linear = type(layer) is nn.Linear and layer is not head
        targets = {target for target in lora.target_modules if f".{name}".endswith(f".{target}")}
        if targets and not is_linear:
            raise AdapterTargetRefused(base, name, "no linear layer")
        if is_linear and (targets or ALL_LINEAR in lora.target_modules):
            layers.append(name)
            missing -= {*targets, ALL_LINEAR}
    if missing:
        raise AdapterTargetRefused(base, min(missing), "absent")
    return layers


def _is_adapters(name: str) -> bool:
    return any(f".{place}.{_ADAPTER}." in name for place in _PLACES)


def adapter_tree(model: nn.Module) -> nn.Module | None:
    """Return a module of a model's adapters alone, under PEFT's names; None if it has none.

    It has the very parameters of the model, as they are now: sharded ones of a sharded model.
    """
    tree = nn.Module()
    for name, parameter in model.named_parameters():
        if _is_adapters(name):
            *path, last = saved_name(name).split(".")
            owner = tree
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, parameter)
    return tree if tree._modules else None


def saved_name(name: str) -> str:
    """Return the name that a parameter of an adapter has in PEFT's files."""
    for place in _PLACES:
        name = name.replace(f".{place}.{_ADAPTER}.", f".{place}.")
    return _PREFIX + name


def weight_names(name: str) -> tuple[str, str]:
    """Return the names in PEFT's files of the adapter for a weight: `lora_A`, and `lora_B`."""
    layer = _PREFIX + name.removesuffix(".weight")
    first, second = (f"{layer}.{place}.weight" for place in _PLACES)
    return first, second


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let the model compute as its base does, for a block without gradients."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    for parameter in trained:
        # PEFT froze them too, and FSDP keeps for ever what it finds at its first gather.
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_config(model: Any) -> dict[str, Any]:
    """Return the content of PEFT's ``adapter_config.json`` for the model's adapters."""
    settings = copy.copy(model.peft_config[_ADAPTER])
    # As PEFT's save_pretrained() does: a loaded adapter is frozen until a trainer says otherwise.
    settings.inference_mode = True
    content: dict[str, Any] = settings.to_dict()
    # JSON has no sets; sorted, the same adapters make the same file.
    return {
        name: sorted(value) if isinstance(value, set) else value for name, value in content.items()
    }


def merged(weight: Tensor, first: Tensor, second: Tensor, scale: float) -> Tensor:
    """Return a layer's weight with its adapter's product, computed in float32.

    Args:
        weight: Weight of the base, whose dtype the result has.
        first: Matrix that is applied first, ``lora_A``.
        second: The other one, ``lora_B``.
        scale: Factor of their product.
    """
    product = second.float() @ first.float() * scale  # (outputs, inputs)
    return (weight.float() + product).to(weight.dtype)
