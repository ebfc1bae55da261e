"""Claims about what a stranger meets first: workflows, templates, and how the project is cited."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def steps(path: Path) -> list[dict]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [
        {"matrix": job.get("strategy", {}).get("matrix", {})} | s
        for job in jobs
        for s in job["steps"]
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_commands_that_the_makefile_has(path):
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = []
    for step in steps(path):
        for made in re.findall(r"\bmake (\S+|\${{ matrix.command }})", step.get("run", "")):
            commands += step["matrix"]["command"] if made.startswith("$") else [made]
    assert set(commands) <= targets
    assert path.stem != "nightly" or set(commands) == {"shuffled", "alone"}


def test_ci_is_the_command_of_developers():
    (ci,) = (step["run"] for step in steps(ROOT / ".github/workflows/ci.yml") if "run" in step)
    assert ci.endswith(" .ci/run")


def test_the_citation_has_the_packages_version():
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == VERSION


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_an_issue_template_names_commands_that_there_are(path):
    text = path.read_text()
    assert yaml.safe_load(text)
    commands = {page.stem for page in (ROOT / "docs" / "commands").glob("*.md")}
    assert set(re.findall(r"`trinity-events ([a-z]+)", text)) <= commands
