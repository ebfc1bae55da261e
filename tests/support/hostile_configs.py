"""Configurations that a writer of a run's events puts into the log to have an explorer run code.

Each names one thing that the explorer's host was not told by its own side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trinity_workers.config.train_config import TrainConfig


class Hostile(NamedTuple):
    """Settings of a hostile configuration, and those among them that are to be refused."""

    settings: dict[str, Any]
    """Values by the path of the setting."""
    refused: dict[str, str]
    """Kind of what is named, by the path of the setting."""


def hostile_configs(proof: Path, url: str) -> dict[str, Hostile]:
    """Return hostile configurations by name.

    Args:
        proof: File that code of the log would write; see :func:`write_hostile_code`.
        url: URL of the log's choice.
    """
    code = f"{proof.with_suffix('.py')}:go"
    shell = {"args": f"echo ran > {proof}", "shell": True}
    token = {"rewards.token_variable": "SECRET"}
    return {
        "task.name with options": Hostile(
            {"task.name": "subprocess:run", "task.options": shell},
            {"task.name": "code", "task.options": "code"},
        ),
        "options of a built-in task": Hostile({"task.options": shell}, {"task.options": "code"}),
        "task.name of a file": Hostile({"task.name": code}, {"task.name": "code"}),
        "task.name that is not installed": Hostile({"task.name": "theirs"}, {"task.name": "code"}),
        "task.questions": Hostile({"task.questions": code}, {"task.questions": "code"}),
        "task.questions of any file": Hostile(
            {"task.questions": "/etc/../etc/hostname.jsonl"}, {"task.questions": "code"}
        ),
        "task.questions of the hub": Hostile(
            {"task.questions": "datasets:theirs/code"}, {"task.questions": "code"}
        ),
        "task.questions of a family that evaluates answers": Hostile(
            {"task.questions": "reasoning-gym:countdown"}, {"task.questions": "code"}
        ),
        "rewards.function": Hostile({"rewards.function": code}, {"rewards.function": "code"}),
        "task.environment": Hostile({"task.environment": code}, {"task.environment": "code"}),
        "explorer.engine": Hostile({"explorer.engine": code}, {"explorer.engine": "code"}),
        "explorer.engine_options": Hostile(
            {"explorer.engine_options": {"worker_cls": code}}, {"explorer.engine_options": "code"}
        ),
        "evaluation.sets": Hostile(
            {"evaluation.sets": {"a": {"questions": code}, "b.c": {"questions": "x:y"}, "d": {}}},
            {"evaluation.sets.a.questions": "code", "evaluation.sets.b.c.questions": "code"},
        ),
        "task.sets": Hostile(
            {"task.sets": {"a": {"questions": code, "source": shell}, "b": {"weight": 2.0}}},
            {"task.sets.a.questions": "code", "task.sets.a.source": "code"},
        ),
        "rewards.service": Hostile(
            {"rewards.service": f"{url}/steal", **token},
            {"rewards.service": "URL", "rewards.token_variable": "environment variable"},
        ),
        "rewards.judge": Hostile(
            {"rewards.judge": f"{url}/v1", "rewards.judge_model": "m", **token},
            {"rewards.judge": "URL", "rewards.token_variable": "environment variable"},
        ),
        "rewards.judge_prompt": Hostile(
            {"rewards.judge_prompt": "{response.__class__.__mro__}"},
            {"rewards.judge_prompt": "code"},
        ),
        "rewards.code_tests": Hostile(
            {"rewards.code_tests": "tests", "rewards.code_memory_mb": 1 << 20},
            {"rewards.code_tests": "code", "rewards.code_memory_mb": "code"},
        ),
        "model.path": Hostile({"model.path": str(proof.parent)}, {"model.path": "path"}),
        "model.path on the hub": Hostile({"model.path": "theirs/model"}, {"model.path": "path"}),
    }


def write_hostile_code(proof: Path) -> None:
    """Write the module that hostile configurations name, as a writer of a shared folder can."""
    proof.with_suffix(".py").write_text(
        f"import pathlib\npathlib.Path({str(proof)!r}).write_text('ran')\n"
    )


def trainer_config(proof: Path, url: str) -> TrainConfig:
    """Return a configuration that names things which the trainer alone uses."""
    code = f"{proof.with_suffix('.py')}:go"
    return with_settings(
        {
            "tracking.trackers": [code],
            "tracking.folder": str(proof.parent),
            "checkpoints.root": str(proof.parent),
            "checkpoints.mirror": f"{url}/mirror",
            "algorithm.advantage": code,
            "algorithm.loss": code,
            "algorithm.options": {"a": code},
            "algorithm.teacher.path": str(proof.parent),
            "rewards.reward_model": str(proof.parent),
        }
    )


def with_settings(settings: dict[str, Any]) -> TrainConfig:
    """Return a configuration with settings by path, decoded as from a log."""
    values = msgspec.json.decode(TrainConfig().to_text())
    for path, value in settings.items():
        *names, last = path.split(".")
        section = values
        for name in names:
            section = section[name]
        section[last] = value
    return TrainConfig.from_text(msgspec.json.encode(values).decode())
