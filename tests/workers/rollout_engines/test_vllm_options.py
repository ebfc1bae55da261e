"""Arguments and environment that vLLM's engine gets from the explorer's place. vLLM is a double."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from tests.support.errors import raises  # noqa: E402
from trinity_workers.rollout_engines import EngineOptions  # noqa: E402
from trinity_workers.rollout_engines.base import EngineOptionsRefused  # noqa: E402
from trinity_workers.rollout_engines.loading import find_engine  # noqa: E402
from trinity_workers.rollout_engines.vllm import options as options_module  # noqa: E402
from trinity_workers.rollout_engines.vllm.options import (  # noqa: E402
    VLLMOptions,
    VLLMUnusable,
    build_engine_args,
    build_gpu_args,
    find_engine_arguments,
    gpus_of,
)

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def build(monkeypatch):
    """Return a function that builds the arguments as a build of vLLM for CPUs or GPUs does."""

    def build(device, gpus=1.0, *, cpu=False, **engine_args):
        parts = {
            "config": {"WeightTransferConfig": lambda **settings: settings},
            "platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
        }
        for name, attributes in {"": {}, **parts}.items():
            module = ModuleType("vllm" + (f".{name}" if name else ""))
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        options = EngineOptions(model_folder=Path("model"), device=device, gpus=gpus)
        own = VLLMOptions(engine_args=engine_args)
        return build_engine_args(options, own) | build_gpu_args(options, own)

    return build


@pytest.mark.parametrize(
    ("gpus", "args"),
    [
        (1.0, {"tensor_parallel_size": 1}),
        (4.0, {"tensor_parallel_size": 4}),
        (0.4, {"gpu_memory_utilization": 0.36}),
    ],
)
def test_it_uses_the_gpus_that_are_reserved_for_the_explorer(build, gpus, args):
    assert build("cuda:0", gpus).items() >= args.items()


def test_engine_args_come_before_the_explorers_gpus(build):
    args = build("cuda:0", 2.0, tensor_parallel_size=1, gpu_memory_utilization=0.5)
    assert (args["tensor_parallel_size"], args["gpu_memory_utilization"]) == (1, 0.5)


def test_more_ranks_than_gpus_are_refused(build):
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with raises(VLLMUnusable, fault="ranks", ranks=4, gpus=2.0):
        build("cuda:0", 2.0, **parallel)


def test_ranks_on_a_cpu_are_those_of_the_engine_args(build):
    assert build("cpu", cpu=True, tensor_parallel_size=2)["tensor_parallel_size"] == 2
    assert "tensor_parallel_size" not in build("cpu", cpu=True)


@pytest.mark.parametrize(("device", "cpu"), [("cpu", False), ("cuda:0", True)])
def test_a_build_of_vllm_for_another_device_is_refused(build, device, cpu):
    with raises(VLLMUnusable, fault="device", device=device):
        build(device, cpu=cpu)


@pytest.mark.parametrize(
    ("device", "gpus", "before", "within"),
    [
        ("cuda:0", 1.0, None, "0"),
        ("cuda:1", 1.0, None, "1"),
        ("cuda:1", 2.0, "4,5,6,7", "5,6"),
        ("cuda:0", 0.5, "3", "3"),
        ("cpu", 1.0, "3", "3"),
        ("cpu", 1.0, None, None),
    ],
)
def test_its_processes_see_the_explorers_gpus_alone(monkeypatch, device, gpus, before, within):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv(VISIBLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VISIBLE, before)
    for _ in range(2):  # an explorer opens another engine in the same process
        with gpus_of(EngineOptions(model_folder=Path("model"), device=device, gpus=gpus)):
            assert os.environ.get(VISIBLE) == within
        assert os.environ.get(VISIBLE) == before


ARGUMENTS = """
class EngineArgs:
    model: str = "x"
    max_num_seqs: int | None = None

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package whose source is that of vLLM, in short, and that cannot be imported."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit")
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(ARGUMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


def test_arguments_that_vllm_does_not_have_are_refused_before_a_run_starts(installed):
    correct = {"max_num_seqs": 4, "enable_log_requests": True}
    assert find_engine_arguments() == {"model", *correct}
    find_engine("vllm", options={"engine_args": correct})
    with raises(VLLMUnusable, fault="unknown", arguments=("max_seqs",), nearest="max_num_seqs"):
        find_engine("vllm", options={"engine_args": {"max_seqs": 4, **correct}})
    with raises(VLLMUnusable, fault="unknown", arguments=("a", "b"), nearest=""):
        find_engine("vllm", options={"engine_args": {"b": 1, "a": 2}})


def test_where_vllm_is_not_installed_its_arguments_are_said_not_to_be_checked(monkeypatch, caplog):
    monkeypatch.setattr(options_module, "find_spec", lambda name: None)
    find_engine("vllm", options={"engine_args": {"max_seqs": 4}})
    assert "are not checked before an explorer starts" in caplog.text


def test_unknown_options_of_other_engines_are_refused_too():
    for engine in ("huggingface", "vllm", "vllm-server"):
        with raises(EngineOptionsRefused, engine=engine):
            find_engine(engine, options={"no_such_option": 1})
