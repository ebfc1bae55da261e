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


lowest = {one.name: one for one in map(Requirement, load_script().lowest(*EXTRAS))}


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for extra in EXTRAS for one in project["optional-dependencies"][extra]]
    return [Requirement(one) for one in (*project["dependencies"], *extras)]


def test_every_dependency_has_a_lowest_version_and_it_is_promised():
    for one in declared():
        [pin] = lowest[one.name].specifier
        assert pin.operator == "=="
        assert one.specifier.contains(pin.version), one


def test_what_constraints_pin_is_promised_and_none_of_it_is_older():
    pinned = {
        one.name: next(iter(one.specifier)).version
        for one in map(Requirement, _lines(ROOT / "constraints.txt"))
    }
    for one in declared():
        if one.name in pinned:
            [low] = lowest[one.name].specifier
            assert one.specifier.contains(pinned[one.name]), one
            assert Version(pinned[one.name]) >= Version(low.version), one


def test_what_megatron_takes_of_transformers_is_promised():
    [low] = lowest["transformers"].specifier
    assert Version(low.version).major >= 5, "rope_parameters came with 5"


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]
