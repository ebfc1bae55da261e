"""The lowest versions of dependencies: what is promised is what make lowest installs and tests."""

import importlib.util
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
EXTRAS = ("embedded", "workers")


def load_script():
    spec = importlib.util.spec_from_file_location("lowest", ROOT / "tests/install/lowest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lowest = {
    requirement.name: requirement for requirement in map(Requirement, load_script().lowest(*EXTRAS))
}


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        requirement for extra in EXTRAS for requirement in project["optional-dependencies"][extra]
    ]
    return [Requirement(requirement) for requirement in (*project["dependencies"], *extras)]


def test_every_dependency_has_a_lowest_version_and_it_is_promised():
    for requirement in declared():
        [pin] = lowest[requirement.name].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), requirement


def test_what_constraints_pin_is_promised_and_none_of_it_is_older():
    pinned = {
        requirement.name: next(iter(requirement.specifier)).version
        for requirement in map(Requirement, _lines(ROOT / "constraints.txt"))
    }
    for requirement in declared():
        if requirement.name in pinned:
            [low] = lowest[requirement.name].specifier
            assert requirement.specifier.contains(pinned[requirement.name]), requirement
            assert Version(pinned[requirement.name]) >= Version(low.version), requirement


def test_what_megatron_takes_of_transformers_is_promised():
    [low] = lowest["transformers"].specifier
    assert Version(low.version).major >= 5, "rope_parameters came with 5"


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]
