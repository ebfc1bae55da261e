"""Runs of the plan: through the pipeline by its command, or in this process alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trinity_workers.config.files import read_config
from trinity_workers.config.train_config import TrainConfig

from .plan import LearningRun
from .results import LearningResult, Measured, Results


class RunFailed(RuntimeError):
    """Raised if the command of a run failed."""


def write_settings(run: LearningRun, results: Results) -> Path:
    """Write the file that `trinity-events train` runs, and return its path."""
    import yaml

    path = results.settings_file(run.name)
    way = f"# {run.family}, {run.way}, seed {run.seed}: trinity-events train {path.name}\n"
    if run.alone:
        way = f"# {run.family}, seed {run.seed}, without the pipeline: make learn\n"
    path.write_text(way + yaml.safe_dump(run.settings, sort_keys=False))
    return path


def perform(run: LearningRun, results: Results) -> LearningResult:
    """Perform a run from its beginning, and write its result."""
    file = write_settings(run, results)
    config = read_config(file).checked()
    # Short, for the sockets below it.
    with tempfile.TemporaryDirectory(prefix="learn-") as place:
        if run.alone:
            fields = _alone(config, Path(place))
        else:
            fields = _through_pipeline(
                file, config, Path(place), results.folder / f"{run.name}.log"
            )
    result = LearningResult(
        name=run.name,
        family=run.family,
        way=run.way,
        seed=run.seed,
        settings=file.read_text(),
        **fields,
    )
    results.write(result)
    return result


def _alone(config: TrainConfig, place: Path) -> dict[str, Any]:
    import torch

    from trinity_workers.launch.model import make_model

    from ..one_process import OneProcess
    from .held_out import Ruler

    torch.set_num_threads(1)
    warm_up_steps, _ = make_model(place / "model", config.seed, config.task.name)
    training = OneProcess(config, place / "model")
    ruler = Ruler(config, training.tokenizer)
    curve = [ruler.measure(training.model, 0)]
    for step in range(1, config.steps + 1):
        training.step()
        if config.is_save_step(step):
            curve.append(ruler.measure(training.model, step))
    return {"curve": curve, "staleness": None, "warm_up_steps": warm_up_steps}


def _through_pipeline(file: Path, config: TrainConfig, home: Path, log: Path) -> dict[str, Any]:
    run_id = file.stem
    command = [sys.executable, "-m", "trinity_events", "train", str(file), "--json"]
    # Servers and a cluster of the user's have no part in it.
    users = {name for name in os.environ if name.startswith("TRINITY_")} | {"RAY_ADDRESS"}
    environment = {name: os.environ[name] for name in os.environ.keys() - users}
    environment["TRINITY_HOME"] = str(home)
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)
        try:
            output, _ = process.communicate()
        except BaseException:
            process.terminate()  # it ends its own processes
            process.communicate()
            raise
    if process.returncode:
        last = (log.read_text().splitlines() or ["it said nothing"])[-1]
        raise RunFailed(f"run {run_id} failed with status {process.returncode}: {last} (see {log})")
    summary: Mapping[str, Any] = msgspec.json.decode(output)
    return {
        "curve": _measured_checkpoints(config, home / "checkpoints" / run_id),
        "staleness": round(summary["staleness_mean"], 4),
        "warm_up_steps": summary["warm_up_steps"],
        "step_seconds": summary["training_seconds"] / config.steps,
    }


def _measured_checkpoints(config: TrainConfig, folder: Path) -> list[Measured]:
    import torch

    from trinity_events.checkpoints.layout import final_name
    from trinity_workers.conversion.convert import convert
    from trinity_workers.learning.policy import load_policy

    from .held_out import Ruler

    torch.set_num_threads(1)
    model, tokenizer = load_policy(Path(config.model.path or folder / "model"))
    ruler = Ruler(config, tokenizer)
    curve = [ruler.measure(model, 0)]
    for step in range(1, config.steps + 1):
        if config.is_save_step(step):
            whole = folder / f"whole-{step}"
            convert(folder / final_name(step) / "actor", whole)
            curve.append(ruler.measure(load_policy(whole)[0], step))
    return curve
