"""Manifest of a run."""

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("ray")

from trinity_workers.trainer.run_manifest import find_commit, manifest_name, write_run_manifest


@pytest.mark.processes  # platform asks uname
def test_a_manifest_has_code_packages_configuration_data_seed_and_hardware(make_config):
    config = make_config(seed=7)
    write_run_manifest(config, "sha256:" + "0" * 64)
    text = (config.checkpoint_folder / manifest_name(config.epoch)).read_text()
    manifest = json.loads(text)
    assert manifest["seeds"] == {"seed": 7}
    assert manifest["data"]["fingerprint"].startswith("sha256:")
    assert manifest["configuration"]["rollouts"]["prompts_per_step"] == 16
    assert {"msgspec", "torch"} <= manifest["packages"].keys()
    assert manifest["hardware"]["cores"] > 0
    assert config.redis_url not in text


def git(folder, *words):
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.processes
def test_the_commit_is_that_of_the_checkout_packed_or_not_and_of_a_worktree(tmp_path):
    repository = tmp_path / "code"
    repository.mkdir()
    git(repository, "init", "-q")
    git(repository, "commit", "-q", "--allow-empty", "-m", "first")
    commit = git(repository, "rev-parse", "HEAD")
    assert find_commit(repository / "module.py") == commit
    git(repository, "worktree", "add", "-q", "-b", "other", str(tmp_path / "other"))
    assert find_commit(tmp_path / "other" / "module.py") == commit
    git(repository, "pack-refs", "--all")
    assert find_commit(repository / "module.py") == commit
    assert find_commit(Path("/no/checkout/module.py")) is None
