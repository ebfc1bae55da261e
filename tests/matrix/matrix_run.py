"""Run of one combination: real processes, two explorers, and one that joins late."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from tests.support.sessions import kill_session
from tests.support.style_properties import PROPERTIES, served_versions, serving_faults, stalest
from tests.support.whole_logs import ledger_faults, whole_log
from trinity_schemas import Envelope, StepTrained

from .combinations import Combination

STEPS, PROMPTS = 8, 4
Log: TypeAlias = Callable[[], Sequence[Envelope]]
"""Reads both streams of a run, in order."""
JOINS_AFTER = 2
"""Steps after which the late explorer is started."""
LATE = 2
"""Rank of the late explorer."""
DEADLINE = 1200.0
"""Seconds for each wait of a run, on a loaded machine too."""
ENGINE_SETTINGS = {
    "vllm": {
        "engine_options": {"engine_args": {"max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 27}}
    }
}
"""Settings of explorers by their engine; a cache of 128 MiB is enough for the matrix's policy."""
REWARD = """
import time
from pathlib import Path

GIVEN, JOINED = (Path(__file__).with_name(name) for name in ("given", "joined"))


def reward(question, answer):
    with GIVEN.open("ab") as file:
        file.write(b".")
    # Of 128: the answers of the last two steps, however far explorers are ahead of the trainer.
    while GIVEN.stat().st_size > 96 and not JOINED.exists():
        time.sleep(0.02)
    return float(answer.tokens % 3)
"""
"""Reward whose last answers wait for the late explorer, so that it joins a run under way."""


class Result(Struct, frozen=True, kw_only=True):
    """Result of one run."""

    name: str
    steps: int
    applied: dict[str, int]
    """Versions that each explorer applied, by its name."""
    joined_at: int | None
    """Step of the first version that the late explorer served, by its announced digest."""
    stalest: int
    holds: list[str]
    """Styles whose property the log has."""
    faults: list[str]
    seconds: float

    def line(self) -> str:
        """Return the result in one line."""
        applied = " ".join(f"{name}:{count}" for name, count in sorted(self.applied.items()))
        summary = (
            f"{self.name:30} {self.steps} steps, applied {applied}, late one joined at version "
            f"{self.joined_at}, staleness <= {self.stalest}, property of {', '.join(self.holds)} "
            f"alone, audit clean"
        )
        return f"{'; '.join([f'{self.name:30} FAULT', *self.faults]) if self.faults else summary}"


class RunFailed(Exception):
    """Raised if a process of the run failed, or kept the others waiting."""


def perform(combination: Combination, folder: Path, model: Path, redis_url: str) -> Result:
    """Run a combination to its end, and return what its log shows.

    Args:
        combination: The combination.
        folder: Folder for the run's files.
        model: Hugging Face folder of the policy.
        redis_url: Server of the log.

    Raises:
        RunFailed: A process failed, or a wait took too long.
    """
    began, run_id = time.monotonic(), combination.name.replace("_", "-")
    folder.mkdir(parents=True)
    joined = folder / "joined"
    (folder / "reward.py").write_text(REWARD)
    file, outputs = folder / "run.yaml", (folder / "train.txt", folder / "late.txt")
    file.write_text(json.dumps(settings(combination, model)))  # JSON is YAML
    where = ["--run", run_id, "--redis-url", redis_url, "--checkpoint-root", str(folder)]

    def log() -> list[Envelope]:
        return whole_log(redis_url, run_id)

    try:
        _run(file, where, outputs, joined, log)
    except RunFailed as error:
        outputs_text = [
            f"{output.name}: {output.read_text()[-2000:]}" for output in outputs if output.is_file()
        ]
        raise RunFailed("\n".join([str(error), *outputs_text])) from None
    return judged(
        combination,
        log(),
        ledger_faults(redis_url, run_id, steps=STEPS, prompts=PROMPTS),
        seconds=time.monotonic() - began,
    )


def _run(file: Path, where: list[str], outputs: tuple[Path, Path], joined: Path, log: Log) -> None:
    """Run the trainer's command and, once two steps were trained, the late explorer's."""
    with started("train", str(file), *where, output=outputs[0]) as training:
        _wait(lambda: _trained(log()) >= JOINS_AFTER, "no steps were trained", training)
        own = ("--rank", str(LATE), "--config", str(file))
        with started("explorer", *own, *where, output=outputs[1]) as late:
            name = f"explorer-{LATE}"
            _wait(
                lambda: name in served_versions(log()), "the late explorer serves nothing", training
            )
            joined.touch()
            _wait(lambda: training.poll() is not None, "training does not end")
            _wait(lambda: late.poll() is not None, "the late explorer does not end")
    for name, process in (("training", training), ("the late explorer", late)):
        if process.returncode:
            raise RunFailed(f"{name} ended with {process.returncode}")


def judged(
    combination: Combination, log: Sequence[Envelope], faults: list[str], *, seconds: float
) -> Result:
    """Return the result of a run by its log, with all that is not as it must be.

    Args:
        combination: The combination.
        log: Both streams, in order.
        faults: Faults of the run's ledger.
        seconds: Seconds that the run took.
    """
    served = served_versions(log)
    faults = [*faults, *serving_faults(log)]
    for name, applied in served.items():
        if applied[-1].version.step != STEPS:
            faults.append(f"{name} ended with the version of step {applied[-1].version.step}")
    expected = {f"explorer-{rank}" for rank in range(LATE + 1)}
    if served.keys() != expected:
        faults.append(f"{', '.join(sorted(served))} served versions")
    holds = [name for name, has in PROPERTIES.items() if has(log)]
    if holds != [combination.style]:
        faults.append(f"the log has the properties of {', '.join(holds) or 'no style'}")
    late = served.get(f"explorer-{LATE}", [])
    return Result(
        name=combination.name,
        steps=_trained(log),
        applied=Counter({name: len(applied) for name, applied in served.items()}),
        joined_at=late[0].version.step if late else None,
        stalest=stalest(log),
        holds=holds,
        faults=faults,
        seconds=seconds,
    )


def settings(combination: Combination, model: Path) -> dict[str, Any]:
    """Return the configuration of a combination's run."""
    return {
        "steps": STEPS,
        "model": {"path": str(model)},
        "rewards": {"function": "./reward.py:reward", "deadline": DEADLINE},
        "trainer": {"engine": combination.engine, "ranks": 2},
        "explorer": {
            "count": LATE,
            "groups_per_claim": 1,
            "engine": combination.rollouts,
            **ENGINE_SETTINGS.get(combination.rollouts, {}),
        },
        "rollouts": {
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": 4,
            "claim_lease": 60.0,
            "request_deadline": DEADLINE,
        },
        "sync": {**combination.sync, "timeout": DEADLINE},
        "checkpoints": {"interval": 0},
        "evaluation": {"sets": {}},
    }


@contextmanager
def started(*words: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a session of its own, which is killed if it outlives the block."""
    command = [sys.executable, "-m", "trinity_events", *words]
    with (
        output.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            kill_session(process.pid)


def _wait(
    met: Callable[[], bool], otherwise: str, training: subprocess.Popen[bytes] | None = None
) -> None:
    """Wait until a condition holds, while training goes on."""
    give_up = time.monotonic() + DEADLINE
    while not met():
        if training is not None and training.poll() is not None:
            raise RunFailed(f"{otherwise}: training ended with {training.returncode}")
        if time.monotonic() > give_up:
            raise RunFailed(f"{otherwise} after {DEADLINE:g} s")
        time.sleep(0.1)


def _trained(log: Sequence[Envelope]) -> int:
    return sum(isinstance(envelope.event, StepTrained) for envelope in log)
