"""Ranks losses twice: by live runs, and by training one recorded, collapsed run again with each.

Usage: python -m benchmarks.counterfactual [--steps N] [--seed N] [--learning-rate RATE]
       [--folder FOLDER]

The recorded run collapses: its loss has no clipping, and takes several large updates on answers
that are some steps old. Each policy is judged at its end by its answers to held-out questions.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio

from trinity_events.checkpoints.layout import final_name
from trinity_schemas import Sampling, StepRef
from trinity_workers.launch.model import make_model
from trinity_workers.learning.policy import load_tokenizer
from trinity_workers.rollout_engines import EngineOptions, load_engine
from trinity_workers.tasks import SpellBackward

from .learning.held_out import make_requests, read_answer

TASK = "spell-backward"
LOSSES = {
    "reinforce": {"loss": "reinforce"},
    "cispo": {"loss": "cispo"},
    "ppo": {"loss": "ppo"},
}
"""Losses that are ranked; the first one is that of the recorded run."""
HELD_OUT = 600
"""Questions: the standard error of a share is at most 0.02."""


def make_settings(
    model: Path, root: Path, options: argparse.Namespace, loss: str
) -> dict[str, Any]:
    """Return the configuration of a run."""
    return {
        "seed": options.seed,
        "steps": options.steps,
        "task": {"name": TASK},
        "model": {"path": str(model)},
        "trainer": {"ranks": 1, "learning_rate": options.learning_rate},
        "sync": {"style": "fully_async", "interval": 4, "max_staleness": 8},
        "algorithm": {"epochs": 4, "mini_batches": 2, **LOSSES[loss]},
        "rollouts": {"prompts_per_step": 8, "samples_per_prompt": 8},
        "evaluation": {"sets": {}},
        "checkpoints": {"interval": options.steps, "root": str(root)},
        "record": {"rollouts": "all"},
    }


def call(*arguments: str) -> str:
    """Run a command of Trinity Events; return its output. Raises SystemExit if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "trinity_events", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


def score_run(root: Path, run: str, steps: int, seed: int) -> float:
    """Return the score of the last checkpoint of a run; see :func:`score`."""
    folder = root / f"hf-{run}"
    call("convert", str(root / run / final_name(steps)), str(folder))
    return score(folder, seed)


def score(folder: Path, seed: int) -> float:
    """Return the share of held-out questions that a policy answers rightly."""
    task = SpellBackward(seed)
    questions = task.held_out(HELD_OUT)
    tokenizer = load_tokenizer(folder)
    version = StepRef(1, 0)
    engine = load_engine("huggingface", EngineOptions(model_folder=folder, serves=version))
    sampling = Sampling(max_new_tokens=SpellBackward.answer_tokens, seed=seed)
    requests = make_requests(tokenizer, questions, sampling)
    generations = anyio.run(engine.generate, requests)
    rewards = [
        task.reward(question, read_answer(tokenizer, generation))["reward"]
        for question, generation in zip(questions, generations, strict=True)
    ]
    return float(sum(rewards) / len(rewards))


def main() -> None:
    """Train all runs, and print both rankings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=7e-4)
    parser.add_argument("--folder", type=Path, help="folder of the runs, which are kept then")
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "model"
        if not (model / "config.json").is_file():
            make_model(model, 0)
        print(f"before training: {score(model, options.seed):.3f}", flush=True)
        rows: dict[str, list[float]] = {}
        recorded = next(iter(LOSSES))
        # The server may know runs of an earlier call.
        prefix = f"losses-{secrets.token_hex(3)}"
        for loss in LOSSES:
            began = time.monotonic()
            settings = make_settings(model, folder, options, loss)
            file = folder / f"{loss}.yaml"
            file.write_text(json.dumps(settings))
            call("train", str(file), "--run", f"{prefix}-live-{loss}")
            rows[loss] = [score_run(folder, f"{prefix}-live-{loss}", options.steps, options.seed)]
            took = time.monotonic() - began
            print(f"live {loss}: {rows[loss][0]:.3f} ({took:.0f} s)", flush=True)
        for loss, algorithm in LOSSES.items():
            given = [
                part
                for key, value in algorithm.items()
                for part in ("--set", f"algorithm.{key}={value}")
            ]
            source, target = f"{prefix}-live-{recorded}", f"{prefix}-record-{loss}"
            root = ("--checkpoint-root", str(folder))
            call("retrain", source, "--from-record", "--run", target, *given, *root)
            rows[loss].append(score_run(folder, target, options.steps, options.seed))
            print(f"from the record, {loss}: {rows[loss][1]:.3f}", flush=True)
    for number, title in enumerate(("live", "from the record")):
        order = sorted(rows.items(), key=lambda row: -row[1][number])
        print(f"{title}: {' > '.join(f'{loss} {scores[number]:.3f}' for loss, scores in order)}")


if __name__ == "__main__":
    main()
