"""Weights of wrapped modules: published under plain names, applied to plain and wrapped ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.tensors import identical
from tests.support.weight_versions import ready

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method:DeprecationWarning"  # torch.compile's own
)


class DataParallelNames(nn.Module):
    """A module in the place where DistributedDataParallel puts it, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def with_wrapped_layer(model: nn.Sequential) -> nn.Module:
    model[0] = checkpoint_wrapper(model[0])
    return model


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "plain": lambda model: model,
    "torch.compile": torch.compile,
    "activation checkpointing": with_wrapped_layer,
    "data parallel": DataParallelNames,
    "compiled data parallel": lambda model: torch.compile(DataParallelNames(model)),
    "data parallel of compiled": lambda model: DataParallelNames(torch.compile(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
async def test_a_wrapped_modules_weights_have_plain_names_and_fit_any_wrapper(
    trainer, explorer, log, wrapper
):
    source = make()
    trainer.open_version(1)
    trainer.publish(WRAPPERS[wrapper](source).state_dict(), 1)
    trainer.commit(1)
    event = await ready(log, 1)
    with explorer.pull(event) as version:
        assert {name for name, _ in version.tensors()} == make().state_dict().keys()
    for other, wrap in WRAPPERS.items():
        serving = make(seed=1)
        explorer.apply(wrap(serving), event)
        expected = source.state_dict()
        for name, tensor in serving.state_dict().items():
            assert identical(tensor, expected[name]), (other, name)


async def test_an_iterator_over_a_compiled_modules_weights_gives_plain_names(
    trainer, explorer, log
):
    trainer.open_version(1)
    trainer.publish(iter(torch.compile(make()).state_dict().items()), 1)
    trainer.commit(1)
    explorer.apply(make(seed=1), await ready(log, 1))


async def test_a_child_called_module_keeps_its_place_next_to_others(trainer, explorer, log):
    def pair(seed: int) -> nn.ModuleDict:
        return nn.ModuleDict({"module": make(seed), "head": make(seed)})

    trainer.open_version(1)
    trainer.publish(pair(0).state_dict(), 1)
    trainer.commit(1)
    serving = pair(1)
    explorer.apply(serving, await ready(log, 1))
    assert identical(serving["module"][0].weight, make().get_parameter("0.weight"))
    with explorer.pull(await ready(log, 1)) as version:
        assert "module.0.weight" in dict(version.tensors())
