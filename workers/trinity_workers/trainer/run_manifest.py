"""Manifest of a run: what has to be the same for a run to be repeated."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import msgspec

from ..config.train_config import RunConfig
from ..storage.durable_files import write_json

_CPU_INFO = Path("/proc/cpuinfo")


def manifest_name(epoch: int) -> str:
    """Return the name of an epoch's manifest in the run's folder."""
    return f"manifest_epoch_{epoch}.json"


def write_run_manifest(config: RunConfig, fingerprint: str) -> None:
    """Write the manifest of an epoch into the run's folder.

    Args:
        config: The run.
        fingerprint: Fingerprint of its task set.
    """
    path = config.checkpoint_folder / manifest_name(config.epoch)
    write_json(path, build_manifest(config, fingerprint))


def build_manifest(config: RunConfig, fingerprint: str) -> dict[str, Any]:
    """Return code, packages, configuration, data, seed and hardware of an epoch."""
    return {
        "format": 1,
        "run_id": config.run_id,
        "epoch": config.epoch,
        "resumed_step": config.resumed_step,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "code": {
            "trinity-events": version("trinity-events"),
            "commit": find_commit(Path(__file__)),
            "python": sys.version.split()[0],
        },
        # Sorted: two manifests are compared line by line.
        "packages": dict(sorted({(d.metadata["Name"], d.version) for d in distributions()})),
        "configuration": msgspec.json.decode(config.to_text()),
        "data": {"fingerprint": fingerprint},
        "model": str(config.model_folder),
        "seeds": {"seed": config.seed},
        "hardware": {
            "machine": platform.machine(),
            "system": platform.platform(),
            "processor": _find_processor(),
            "cores": os.cpu_count(),
            "nodes": _list_nodes(),
        },
    }


def find_commit(path: Path) -> str | None:
    """Return the commit of the repository that a file is in; None outside of one.

    git itself is not run: it need not be installed where a run trains.
    """
    for folder in path.resolve().parents:
        git = folder / ".git"
        if git.is_file():  # of a worktree: it names its own folder
            git = folder / git.read_text().removeprefix("gitdir:").strip()
        if not (git / "HEAD").is_file():
            continue
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        common = git / "commondir"
        shared = git / common.read_text().strip() if common.is_file() else git
        for place in (git / name, shared / name):
            if place.is_file():
                return place.read_text().strip()
        return _find_packed(shared / "packed-refs", name)
    return None


def _find_packed(path: Path, name: str) -> str | None:
    if not path.is_file():
        return None
    lines = (line.split() for line in path.read_text().splitlines())
    return next((words[0] for words in lines if words[1:] == [name]), None)


def _find_processor() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return ""


def _list_nodes() -> list[dict[str, Any]]:
    """Return the resources of the hosts of the Ray cluster; none outside of one."""
    import ray

    if not ray.is_initialized():
        return []
    # Names of nodes are resources, too, and of no use in a comparison.
    return [
        {
            name: amount
            for name, amount in sorted(node["Resources"].items())
            if not name.startswith("node:")
        }
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
