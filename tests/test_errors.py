"""Errors of the product: a text in the snapshot for each, from attributes that pickling keeps."""

import ast
import functools
import importlib
import pickle
import pkgutil
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import ray.cloudpickle
from ray.exceptions import RayTaskError

import trinity_events
import trinity_schemas
import trinity_workers
from tests.snapshots.errors import ERRORS
from trinity_events.errors import StructuredError

ROOT = Path(__file__).parents[1]
BASES = {
    "AlgorithmError",
    "BadPolicy",
    "BadSettings",
    "CannotResume",
    "CheckpointRefused",
    "ContractError",
    "ConversionRefused",
    "CorruptVersion",
    "IncompatibleWeights",
    "LogLost",
    "RequestRefused",
    "RewardFailed",
    "RolloutEngineError",
    "SettingsRefused",
    "StructuredError",
    "TaskError",
    "TrinityError",
    "VersionUnavailable",
}
"""Classes that are never raised themselves."""
NEEDS_OTHERS = (
    "trinity_workers.verl.backend",
    "trinity_workers.rollout_engines.vllm.transfer",
)
"""Modules that need veRL or vLLM. They have no errors."""


@functools.cache
def all_errors() -> dict[str, type[BaseException]]:
    """Return the error classes of the product by name."""
    errors: dict[str, type[BaseException]] = {}
    for package in (trinity_schemas, trinity_events, trinity_workers):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith(".__main__") or module.name in NEEDS_OTHERS:
                continue
            for value in vars(importlib.import_module(module.name)).values():
                if (
                    isinstance(value, type)
                    and issubclass(value, Exception)
                    and value.__module__.startswith("trinity_")
                ):
                    assert errors.setdefault(value.__name__, value) is value
    return errors


by_name = pytest.mark.parametrize("name", sorted(ERRORS))


def test_every_error_has_a_text_in_the_snapshot_or_is_a_base():
    assert set(all_errors()) - set(ERRORS) == BASES


def test_no_base_is_raised_itself():
    folders = ("schemas", "trinity_events", "workers")
    raised = [
        f"{path}:{node.lineno}"
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if getattr(node.exc.func, "id", "") in BASES
    ]
    assert raised == []


@by_name
def test_the_texts_of_an_error_are_those_of_the_snapshot(name):
    made = [str(all_errors()[name](**attributes)) for attributes, _ in ERRORS[name]]
    assert made == [text for _, text in ERRORS[name]]


def test_every_fault_of_an_error_has_a_text_in_the_snapshot():
    for name, samples in ERRORS.items():
        if texts := getattr(error := all_errors()[name], "texts", None):
            sampled = {attributes["fault"] for attributes, _ in samples}
            faults = get_args(get_type_hints(error)["fault"])
            assert sampled == set(faults) == set(texts), name


@by_name
def test_an_error_survives_the_boundary_of_a_process(name):
    error = all_errors()[name]
    for attributes, text in ERRORS[name]:
        for pickler in (pickle, ray.cloudpickle):
            raised = error(**attributes)
            raised.add_note("a note")
            copy = pickle.loads(pickler.dumps(raised))
            assert type(copy) is error
            assert str(copy) == text
            assert repr(copy) == repr(raised)
            assert copy.__notes__ == ["a note"]


@by_name
def test_an_error_that_ray_raises_has_the_attributes(name):
    error = all_errors()[name]
    for attributes, _ in ERRORS[name]:
        raised = error(**attributes)
        of_ray = RayTaskError("task", "traceback", raised).as_instanceof_cause()
        assert isinstance(of_ray, error)
        assert {name: getattr(of_ray, name) for name in vars(raised)} == vars(raised)


def test_an_error_is_itself_alone():
    class Failed(StructuredError):
        step: int
        reason: str = "no reason"
        text = "step {step} failed: {reason}"

    error = Failed(5)
    assert error != Failed(5)
    assert str(error) == "step 5 failed: no reason"
    assert repr(error).endswith("Failed(step=5, reason='no reason')")
