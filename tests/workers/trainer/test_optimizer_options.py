"""Policy and critic get the optimizer's options of the configuration, on every engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from trinity_workers.engines.adamw import AdamWOptions  # noqa: E402
from trinity_workers.trainer.models import fsdp, verl  # noqa: E402

CPU = torch.device("cpu")
SETTINGS = {
    "weight_decay": 0.2,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-5,
    "max_grad_norm": 0.5,
}
OPTIONS = AdamWOptions(weight_decay=0.2, beta1=0.8, beta2=0.95, epsilon=1e-5, max_grad_norm=0.5)


class Engines:
    """Stands in for the class of an engine, and records the arguments of each engine made."""

    def __init__(self) -> None:
        self.arguments = []

    def __call__(self, folder, **arguments):
        self.arguments.append(arguments)
        return SimpleNamespace(adapters=None, module=torch.nn.Identity(), optimizer=None)


@pytest.fixture
def engines():
    return Engines()


@pytest.mark.parametrize(("settings", "options"), [({}, AdamWOptions()), (SETTINGS, OPTIONS)])
def test_fsdp_gives_them_to_policy_and_critic(make_config, monkeypatch, engines, settings, options):
    monkeypatch.setattr(fsdp, "FSDPEngine", engines)
    fsdp.load_models(make_config(trainer=settings), CPU, ["policy", "critic"])
    assert [arguments["adamw"] for arguments in engines.arguments] == [options, options]


@pytest.mark.heavy
@pytest.mark.megatron
def test_megatron_gives_them_to_policy_and_critic(make_config, monkeypatch, engines):
    pytest.importorskip("megatron.core")
    from trinity_workers.trainer.models import megatron

    for name in ("MegatronEngine", "MegatronCritic"):
        monkeypatch.setattr(megatron, name, engines)
    config = make_config(trainer={"engine": "megatron"} | SETTINGS)
    megatron.load_models(config, CPU, ["policy", "critic"])
    assert [made["optimizer"].adamw for made in engines.arguments] == [OPTIONS, OPTIONS]


def test_verls_engine_gets_them(make_config, monkeypatch, engines):
    monkeypatch.setattr(verl, "VerlEngine", engines)
    verl.make_step(make_config(trainer={"engine": "verl"} | SETTINGS), CPU, ["policy"])
    assert [made["options"].adamw for made in engines.arguments] == [OPTIONS]
