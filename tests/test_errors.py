"""Errors of the product: a text in the snapshot for each, from attributes that pickling keeps."""

import ast
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


CLASSES = all_errors()
SAMPLES = [
    pytest.param(CLASSES[name], attributes, text, id=f"{name}-{number}")
    for name, samples in sorted(ERRORS.items())
    for number, (attributes, text) in enumerate(samples)
]


def test_every_error_has_a_text_in_the_snapshot_or_is_a_base():
    assert set(CLASSES) - set(ERRORS) == BASES


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


@pytest.mark.parametrize(("error", "attributes", "text"), SAMPLES)
def test_the_text_of_an_error_is_that_of_the_snapshot(error, attributes, text):
    assert str(error(**attributes)) == text


def test_every_fault_of_an_error_has_a_text_in_the_snapshot():
    for name, samples in ERRORS.items():
        if texts := getattr(CLASSES[name], "texts", None):
            sampled = {attributes["fault"] for attributes, _ in samples}
            faults = get_args(get_type_hints(CLASSES[name])["fault"])
            assert sampled == set(faults) == set(texts), name


@pytest.mark.parametrize("pickler", [pickle, ray.cloudpickle], ids=["pickle", "ray"])
@pytest.mark.parametrize(("error", "attributes", "text"), SAMPLES)
def test_an_error_survives_the_boundary_of_a_process(error, attributes, text, pickler):
    raised = error(**attributes)
    raised.add_note("a note")
    copy = pickle.loads(pickler.dumps(raised))
    assert type(copy) is error
    assert str(copy) == text
    assert repr(copy) == repr(raised)
    assert copy.__notes__ == ["a note"]


@pytest.mark.parametrize(("error", "attributes", "text"), SAMPLES)
def test_an_error_that_ray_raises_has_the_attributes(error, attributes, text):
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
