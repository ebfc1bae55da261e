"""Claim: the image of compose.yaml has the packages of every command that a service starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")

ROOT = Path(__file__).parents[2]
EXTRAS = {
    "reducer": set(),
    "dashboard": {"dashboard"},
    "metrics": {"metrics"},
    "train": {"workers"},
    "explorer": {"workers"},
}
"""Extras that a command needs beyond the base install."""


def test_the_image_has_the_extras_of_each_service() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    commands = {
        service["command"][0] for service in services if service["image"] == "trinity-events"
    }
    assert commands == EXTRAS.keys(), "a service has another command: enter its extras here"
    [listed] = re.findall(r"for extra in \((.*?)\)", (ROOT / "Dockerfile").read_text())
    installed = set(re.findall(r"'(\w+)'", listed))
    assert set().union(*EXTRAS.values()) == installed
