"""The trainer's interface is Trinity-RFT's: each name, with its parameters in their order."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.errors import raises  # noqa: E402
from tests.support.experiences import make_groups  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from tests.support.worker_ranks import LocalActor  # noqa: E402
from trinity_events import CheckpointCoordinator, Synchronizer  # noqa: E402
from trinity_events.checkpoints.layout import FILE_DIGESTS  # noqa: E402
from trinity_schemas import Experience  # noqa: E402
from trinity_workers import trainer as package  # noqa: E402
from trinity_workers.trainer import upstream  # noqa: E402
from trinity_workers.trainer.backend import CannotLoad, NoWeightSyncGroup  # noqa: E402
from trinity_workers.trainer.ray_backend import RayTrainBackend  # noqa: E402
from trinity_workers.trainer.workers.fsdp import TrainWorker  # noqa: E402
from trinity_workers.worker_group.group import WorkerGroup  # noqa: E402

GROUP = ["master_address", "master_port", "world_size", "group_name", "timeout"]
METHODS = {
    "Trainer": {
        "__init__": ["config"],
        "prepare": [],
        "get_weight_sync_info": [],
        "setup_weight_sync_group": GROUP,
        "teardown_weight_sync_group": [],
        "train": [],
        "train_step": ["exps"],
        "need_sync": [],
        "need_save": [],
        "sync_weight": [],
        "save_checkpoint": ["block_until_saved", "save_as_hf"],
        "shutdown": [],
        "is_alive": [],
        "get_actor": ["config"],
    },
    "TrainEngineWrapper": {
        "prepare": [],
        "train_step": ["batch_exps"],
        "save_checkpoint": ["block_until_saved", "save_as_hf"],
        "wait_for_save": [],
        "sync_weight_nccl": [],
        "upload_state_dict": [],
        "save_state_dict": [],
        "get_weight_sync_info": [],
        "setup_weight_sync_group": GROUP,
        "teardown_weight_sync_group": [],
    },
}
"""Methods of the classes that the upstream documentation names, with their parameters."""
FUNCTIONS = {
    "get_latest_hf_checkpoint_path": ["config"],
    "get_trainer_wrapper": ["config"],
    "is_verl_legacy": [],
}


_SAVE = ["engine", "local_path", "global_step", "coordinator", "logger"]
_UPLOAD = ["engine", "synchronizer", "global_step", "logger"]
HELPERS = {
    f"{engine}_{name}": parameters
    for engine in ("fsdp", "megatron")
    for name, parameters in {
        "save_state_dict": _SAVE,
        "upload_state_dict": _UPLOAD,
        "sync_weight_nccl": ["engine", "model_update_group"],
    }.items()
}
COORDINATOR = {
    "save_async": ["name", "save_fn", "global_step", "is_state_dict"],
    "save_sync": ["save_fn", "global_step", "is_state_dict"],
    "wait_all": [],
    "register_and_monitor": [
        "global_step",
        "is_state_dict",
        "state_dict_thread_count",
        "checkpoint_thread_count",
    ],
}


def called_with(function, parameters):
    """Check that a call by these parameters, in this order, fits: further ones have defaults."""
    given = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    assert [parameter.name for parameter in given[: len(parameters)]] == parameters
    assert all(parameter.default is not parameter.empty for parameter in given[len(parameters) :])


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (owner, name, parameters)
        for owner, all_ in METHODS.items()
        for name, parameters in all_.items()
    ],
)
def test_a_method_of_upstream_exists_with_its_parameters(owner, name, parameters):
    called_with(getattr(getattr(package, owner), name), parameters)


@pytest.mark.parametrize(("name", "parameters"), sorted(HELPERS.items()))
def test_a_helper_of_upstream_exists_with_its_parameters(name, parameters):
    module = import_module(f"trinity_workers.helpers.{name.partition('_')[0]}")
    called_with(getattr(module, name), parameters)


@pytest.mark.parametrize(("name", "parameters"), sorted(COORDINATOR.items()))
def test_a_method_of_upstreams_coordinator_exists_with_its_parameters(name, parameters):
    called_with(getattr(CheckpointCoordinator, name), parameters)


TYPES: dict[str, tuple[dict[str, Any], Any]] = {
    "get_weight_sync_info": ({}, tuple[str, int, list[Any]] | None),
    "setup_weight_sync_group": (
        {
            "master_address": str,
            "master_port": int,
            "world_size": int,
            "group_name": str,
            "timeout": int,
        },
        type(None),
    ),
    "teardown_weight_sync_group": ({}, type(None)),
    "train_step": ({"exps": list[Experience], "batch_exps": list[Experience]}, dict[str, Any]),
    "save_checkpoint": ({"block_until_saved": bool, "save_as_hf": bool}, type(None)),
    "need_sync": ({}, bool),
    "need_save": ({}, bool),
}
"""Types of upstream's parameters and results; a parameter counts where the method has it."""


def fits(value: Any, place: Any) -> bool:
    """Return True if every value of one type may stand where the other is expected."""
    if Any in (value, place):
        return True
    if get_origin(value) in (Union, UnionType):
        return all(fits(part, place) for part in get_args(value))
    if get_origin(place) in (Union, UnionType):
        return any(fits(value, part) for part in get_args(place))
    if not issubclass(get_origin(value) or value, get_origin(place) or place):
        return False
    values, places = get_args(value), get_args(place)
    return not places or (len(values) == len(places) and all(map(fits, values, places)))


@pytest.mark.parametrize("owner", METHODS)
@pytest.mark.parametrize("name", TYPES)
def test_a_method_takes_and_returns_values_of_upstreams_types(owner, name):
    method = getattr(getattr(package, owner), name, None)
    if method is None:
        assert name not in METHODS[owner]
        return
    hints = get_type_hints(method)
    parameters, result = TYPES[name]
    for parameter, upstream_type in parameters.items():
        if parameter in hints:
            assert fits(upstream_type, hints[parameter]), parameter
    assert fits(hints["return"], result)


def test_types_that_do_not_fit_are_seen():
    assert not fits(list[Experience], Sequence[Sequence[Experience]])
    assert not fits(str | None, str)
    assert not fits(tuple[str, int], tuple[str, int, list[Any]])


def test_a_flat_list_of_samples_is_grouped_by_ordinal():
    groups = make_groups("flat", 1)
    flat = [sample for index in range(4) for group in groups for sample in group[index : index + 1]]
    assert package.group_by_prompt(flat) == groups
    assert package.group_by_prompt(groups) == groups
    assert package.group_by_prompt([groups[0], []]) == groups[:1]


@pytest.mark.parametrize("batch", [[], [[]], [*make_groups("mixed", 1, 1)[0], []]])
def test_a_batch_without_samples_or_of_two_forms_is_refused(batch):
    with pytest.raises(package.UnusableBatch):
        package.group_by_prompt(batch)


async def test_a_step_on_a_flat_list_is_that_on_its_groups(fleet):
    calls = []

    class Ranks:
        async def call(self, method, groups):
            calls.append((method, groups))
            return {"loss": 0.5}

    fleet._workers = Ranks()
    groups = make_groups("flat", 2)
    flat = [sample for group in groups for sample in group]
    assert await fleet.train_step(flat) == await fleet.train_step(groups) == {"loss": 0.5}
    assert calls == [("train_step", groups)] * 2
    assert fleet.train_step_num == 2


NOT_ASYNCHRONOUS = {"__init__", "need_save", "get_actor"}


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, all_ in METHODS.items() for name in all_]
)
def test_what_upstream_awaits_can_be_awaited(owner, name):
    awaited = inspect.iscoroutinefunction(getattr(getattr(package, owner), name))
    assert awaited == (name not in NOT_ASYNCHRONOUS)


@pytest.mark.parametrize("owner", METHODS)
def test_a_checkpoint_is_saved_in_the_background_and_as_shards_unless_told_otherwise(owner):
    parameters = inspect.signature(getattr(package, owner).save_checkpoint).parameters
    names = ("block_until_saved", "save_as_hf")
    assert [parameters[name].default for name in names] == [False, False]


async def test_an_engine_with_upstreams_abstract_methods_alone_is_one(tmp_path):
    abstract = {"train_step_num", *METHODS["TrainEngineWrapper"]} - {"wait_for_save"}
    assert package.TrainEngineWrapper.__abstractmethods__ == abstract
    engine = type("Theirs", (package.TrainEngineWrapper,), dict.fromkeys(abstract))()
    await engine.wait_for_save()
    await engine.shutdown()
    with raises(CannotLoad, engine="Theirs", step=3, folder=tmp_path):
        await engine.load_checkpoint(tmp_path, 3)


@pytest.mark.parametrize(("name", "parameters"), sorted(FUNCTIONS.items()))
def test_a_function_of_upstream_exists_with_its_parameters(name, parameters):
    called_with(getattr(package, name), parameters)


def test_the_number_of_steps_is_a_property():
    for owner in (package.Trainer, package.TrainEngineWrapper):
        assert isinstance(inspect.getattr_static(owner, "train_step_num"), property)


@pytest.mark.parametrize(
    ("named", "expected"),
    [(None, None), ("4", None), ("5", 5), ("29", 5), ("30", 30), ("100", 30), ("200", 200)],
)
def test_the_newest_folder_with_weights_up_to_the_iteration_file_is_found(
    tmp_path, named, expected
):
    config = SimpleNamespace(checkpoint_folder=tmp_path / "run")
    assert package.get_latest_hf_checkpoint_path(config) is None
    for step in (5, 30, 100, 200):
        folder = config.checkpoint_folder / f"global_step_{step}" / "actor" / "huggingface"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        if step != 100:
            (folder / FILE_DIGESTS).write_text("0  model.safetensors\n")
    (config.checkpoint_folder / ".staging").mkdir()
    if named is not None:
        (config.checkpoint_folder / "latest_checkpointed_iteration.txt").write_text(named)
    root = config.checkpoint_folder
    expected_path = expected and str(root / f"global_step_{expected}" / "actor" / "huggingface")
    assert package.get_latest_hf_checkpoint_path(config) == expected_path


@pytest.mark.parametrize("text", ["", "five", "5 6", "-1"])
def test_an_iteration_file_without_a_step_is_refused_by_name(tmp_path, text):
    path = tmp_path / "latest_checkpointed_iteration.txt"
    path.write_text(text)
    with raises(upstream.BadIterationFile, path=path, content=repr(text)):
        package.get_latest_hf_checkpoint_path(SimpleNamespace(checkpoint_folder=tmp_path))


@pytest.mark.parametrize(
    ("version", "legacy"),
    [
        *(("0.7.1", True), ("0.3.0.post1", True), ("0.8.0", False), ("0.8rc1", False)),
        *(("0.10.0.dev0", False), ("1", False)),
    ],
)
def test_verl_before_its_engines_is_legacy(monkeypatch, version, legacy):
    monkeypatch.setattr(upstream, "version", lambda _: version)
    assert package.is_verl_legacy() is legacy


# --- the group ----------------------------------------------------------------------------------


@pytest.fixture
def fleet(make_config):
    """A fleet of one rank, with a real synchronizer and no process."""
    config = make_config(sync={"method": "nccl", "timeout": PATIENCE})
    urls = {"redis_url": config.redis_url, "weights_url": config.weights_url}
    synchronizer = Synchronizer(config.run_id, config.epoch, transport="collective", **urls)
    worker = TrainWorker(config, 0)
    worker._synchronizer = synchronizer
    tensors = [("weight", torch.zeros(2, 3, dtype=torch.bfloat16))]
    worker._models = SimpleNamespace(
        policy=SimpleNamespace(get_per_tensor_param=lambda: iter(tensors))
    )
    made = RayTrainBackend(config, [])
    made._workers = WorkerGroup(TrainWorker, [LocalActor(worker)])
    with closing(synchronizer), closing(made._log), closing(made._publisher):
        yield made


async def test_the_group_forms_at_the_address_that_was_told_and_again(fleet):
    host, port, tensors = await fleet.get_weight_sync_info()
    assert tensors == [("weight", "bfloat16", (2, 3))]
    config = fleet._config
    explorer = Synchronizer(
        config.run_id,
        0,
        redis_url=config.redis_url,
        weights_url=config.weights_url,
        role="explorer",
    )
    with closing(explorer):
        explorer.join_weight_sync_group()
        await fleet.setup_weight_sync_group(host, port, 2, "rollouts", int(PATIENCE))
    await fleet.teardown_weight_sync_group()


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("tinker", "Tinker's service holds"),
        ("deepspeed", "choose fsdp, megatron, verl or verl-megatron"),
    ],
)
def test_an_engine_that_is_not_here_is_refused_with_the_way_out(make_config, engine, reason):
    config = make_config().replaced("trainer", engine=engine)
    with pytest.raises(ValueError, match=f"^there is no engine '{engine}': {reason}"):
        package.get_trainer_wrapper(config)


def test_tensors_are_described_in_the_dtype_in_which_they_are_sent(make_config):
    config = make_config(sync={"method": "nccl"})
    tensors = [("weight", torch.zeros(2)), ("steps", torch.zeros(2, dtype=torch.int64))]
    worker = TrainWorker.__new__(TrainWorker)
    worker._models = SimpleNamespace(
        policy=SimpleNamespace(get_per_tensor_param=lambda: iter(tensors))
    )
    urls = {"redis_url": config.redis_url, "weights_url": config.weights_url}
    worker._synchronizer = Synchronizer(
        config.run_id, config.epoch, transport="collective", dtype=torch.bfloat16, **urls
    )
    with closing(worker._synchronizer):
        described = worker.describe_tensors()
    assert described == [("weight", "bfloat16", (2,)), ("steps", "int64", (2,))]


async def test_a_group_that_cannot_be_is_refused_in_a_sentence(fleet, make_config):
    host, port, _ = await fleet.get_weight_sync_info()
    with raises(NoWeightSyncGroup, fault="address", address=f"{host}:{port}", given="elsewhere:1"):
        await fleet.setup_weight_sync_group("elsewhere", 1, 2, "rollouts", 1)
    with raises(NoWeightSyncGroup, fault="size", group="rollouts", size=1):
        await fleet.setup_weight_sync_group(host, port, 1, "rollouts", 1)
    fleet._config = make_config()
    assert await fleet.get_weight_sync_info() is None
    with raises(NoWeightSyncGroup, fault="method"):
        await fleet.setup_weight_sync_group(host, port, 2, "rollouts", 1)
    await fleet.teardown_weight_sync_group()
