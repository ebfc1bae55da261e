"""Run that is killed at random moments and started again, and what must be true at its end."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.rollout_histories import count_raw
from tests.support.saved_checkpoints import ready_checkpoints, tensors_of
from tests.support.sessions import kill_session
from tests.support.style_properties import serving_faults
from tests.support.tensors import identical
from tests.support.waits import PATIENCE
from tests.support.whole_logs import ledger_faults, whole_log
from trinity_events.checkpoints.layout import final_name
from trinity_events.record.reader import RolloutRecord
from trinity_events.server import connect_sync
from trinity_schemas import Envelope, RunKeys, RunOpened, RunResumed, StepTrained
from trinity_workers.launch.model import make_model

PROMPTS = 4
ON_POLICY = {
    "sync": {"max_staleness": 0},
    "explorer": {"deterministic": True},
    "evaluation": {"sets": {}},
    "record": {"rollouts": "all"},
}
"""Conditions under which a resumed run ends with the bits of an undisturbed one."""
ADAPTERS = ON_POLICY | {"model": {"lora": {"rank": 4}}}
"""As that one, and adapters are trained in the place of the policy."""
ASYNCHRONOUS = {
    "sync": {"max_staleness": 2},
    "explorer": {"groups_per_claim": 1},
    "evaluation": {"sets": {}},
    "rollouts": {"order": "arrival"},
    "record": {"rollouts": "all"},
}
BY_FILES = ASYNCHRONOUS | {"sync": {"method": "checkpoint", "max_staleness": 2}}
"""As the asynchronous one, and explorers load versions from files."""
MOMENTS = 150
"""Entries of the log, from a start on, within which it is killed."""

Report = Callable[[str], None]


def warm_model(folder: Path) -> Path:
    """Return a policy that gives some right answers, or rewards would teach it nothing."""
    if not (folder / "config.json").is_file():
        make_model(folder, 0)
    return folder


class KilledRun:
    """Run of ``trinity-events train`` whose processes are all killed now and then.

    Args:
        folder: Folder for its configuration and its checkpoints.
        model: Folder of the policy.
        redis_url: Server of the log, which outlives the run's processes.
        run_id: Name of the run.
        style: Sections of the configuration.
        ranks: Ranks of the trainer.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        redis_url: str,
        run_id: str,
        style: dict[str, dict[str, Any]],
        *,
        ranks: int = 1,
    ) -> None:
        self.folder, self.redis_url, self.run_id = folder, redis_url, run_id
        self._keys = RunKeys.of(run_id)
        self._file = folder / f"{run_id}.yaml"
        settings: dict[str, Any] = {
            "trainer": {"ranks": ranks},
            "checkpoints": {"interval": 2, "root": str(folder)},
            **style,
        }
        settings["model"] = {"path": str(model), **style.get("model", {})}
        rollouts = {"prompts_per_step": PROMPTS, "samples_per_prompt": 4, "claim_lease": 5.0}
        settings["rollouts"] = rollouts | style.get("rollouts", {})
        self._file.write_text(json.dumps(settings))

    def finish(self, steps: int, explorers: int = 1) -> None:
        """Run to the end. Raises AssertionError with what it printed if it fails."""
        done = subprocess.run(
            self._command(steps, explorers),
            capture_output=True,
            text=True,
            check=False,
            timeout=5 * PATIENCE,
        )
        assert done.returncode == 0, done.stderr[-8000:]

    def kill(self, steps: int, explorers: int, moment: int) -> None:
        """Start it, and kill all of it once so many entries came to its log; or let it end."""
        with connect_sync(self.redis_url) as client:
            enough = client.xlen(self._keys.events) + moment
            self._kill(steps, explorers, lambda: client.xlen(self._keys.events) >= enough)

    def kill_with_checkpoint(self) -> int:
        """Start it, and kill all of it once a checkpoint is ready; return the newest one's step."""
        # A look reads the log: too many of them would hold up the run.
        self._kill(1_000_000, 1, lambda: self.newest_checkpoint() > 0, between=0.2)
        return self.newest_checkpoint()

    def _kill(
        self, steps: int, explorers: int, is_due: Callable[[], bool], *, between: float = 0.002
    ) -> None:
        with subprocess.Popen(
            self._command(steps, explorers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            give_up = time.monotonic() + 5 * PATIENCE
            while process.poll() is None and not is_due():
                assert time.monotonic() < give_up, "the run stood still"
                time.sleep(between)
            kill_session(process.pid)

    def newest_checkpoint(self) -> int:
        """Return the newest step with a checkpoint; 0 for none."""
        ready = ready_checkpoints(self.redis_url, self.run_id)
        return max((event.step for event in ready), default=0)

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        """Return the tensors of model and optimizer of a checkpoint, by file and place."""
        actor = self.folder / self.run_id / final_name(step) / "actor"
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(actor.glob("*.pt")):
            tensors |= {
                f"{path.name}:{place}": tensor for place, tensor in tensors_of(path).items()
            }
        return tensors

    def faults(self, steps: int) -> list[str]:
        """Return what is wrong with the fates of its prompts, and with the versions served."""
        log = whole_log(self.redis_url, self.run_id)
        return [
            *ledger_faults(self.redis_url, self.run_id, steps=steps, prompts=PROMPTS),
            *serving_faults(log),
            *record_faults(self.folder / self.run_id, log),
            *goodput_faults(self.goodput(), self.folder / self.run_id),
        ]

    def goodput(self) -> dict[str, Any]:
        """Return the goodput that the command prints."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "trinity_events", "goodput", self.run_id, "--json"),
                *("--redis-url", self.redis_url, "--checkpoint-root", str(self.folder)),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr[-8000:]
        goodput: dict[str, Any] = json.loads(done.stdout)
        return goodput

    def recomputed(self) -> int:
        """Return the number of requests beyond the first one of an ordinal."""
        with connect_sync(self.redis_url) as client:
            payloads = [fields[b"e"] for _, fields in client.xrange(self._keys.events)]
        [*_, count] = count_raw(payloads)
        return sum(count.recomputed.values())

    def retrain(self) -> str:
        """Train it again from its record; return what the command printed. Raises if it differs."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "trinity_events", "retrain", self.run_id, "--from-record"),
                *("--checkpoint-root", str(self.folder), "--redis-url", self.redis_url),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=5 * PATIENCE,
        )
        assert done.returncode == 0, done.stderr[-8000:]
        return done.stdout

    def _command(self, steps: int, explorers: int) -> list[str]:
        return [
            *(sys.executable, "-m", "trinity_events", "train", str(self._file)),
            *("--run", self.run_id, "--redis-url", self.redis_url),
            *("--set", f"steps={steps}", "--set", f"explorer.count={explorers}"),
        ]


def record_faults(folder: Path, log: Sequence[Envelope]) -> list[str]:
    """Return what is wrong with a record of all rollouts, by the events of the log.

    Every sample of a step that counts is recorded once, of the epoch that counts, and no other one.
    """
    trained: dict[int, tuple[int, set[int]]] = {}
    epoch = 0
    for envelope in log:
        match event := envelope.event:
            case RunOpened():
                epoch = envelope.epoch
                trained.clear()
            case RunResumed():
                epoch = envelope.epoch
                trained = {step: fates for step, fates in trained.items() if step <= event.step}
            case StepTrained() if envelope.epoch == epoch:
                ordinals = {
                    ordinal for first, last in event.trained for ordinal in range(first, last + 1)
                }
                trained[event.step] = epoch, ordinals
    record = RolloutRecord(folder, folder.name)
    steps = {recorded.step: recorded for recorded in record.list_steps()}
    faults = [f"steps {sorted(steps.keys() ^ trained.keys())}"] * (steps.keys() != trained.keys())
    for step in steps.keys() & trained.keys():
        rows = record.read(steps[step])
        recorded = Counter((row["epoch"], row["ordinal"], row["sample"]) for row in rows)
        of_epoch, ordinals = trained[step]
        samples = range(rows[0]["samples"])
        expected = Counter(
            (of_epoch, ordinal, sample) for ordinal in ordinals for sample in samples
        )
        if recorded != expected:
            faults.append(
                f"step {step}: lacks {expected - recorded}, has too often {recorded - expected}"
            )
    return faults


def goodput_faults(goodput: dict[str, Any], folder: Path) -> list[str]:
    """Return which sums of a goodput are wrong: of its processes, and by the record of the run.

    The seconds of all processes are those of all fates, to 0.1 %. The trained tokens and samples
    are those that the record has, to the token.
    """
    by_fate = sum(goodput["seconds"].values())
    by_process = sum(
        seconds for worker in goodput["workers"] for seconds in worker["seconds"].values()
    )
    record = RolloutRecord(folder, folder.name)
    rows = [
        row
        for recorded in record.list_steps()
        for row in record.read(recorded, ["ordinal", "sample", "turns"])
    ]
    recorded = sum(
        turn["tokens"] for row in rows for turn in row["turns"] if turn["role"] == "policy"
    )
    faults = []
    if abs(by_fate / by_process - 1) > 0.001:
        faults.append(f"the seconds of all fates are {100 * by_fate / by_process:.3f} % of all")
    least = min([*goodput["seconds"].values(), *goodput["tokens"].values()])
    if least < 0:
        faults.append(f"a fate has {least} seconds or tokens")
    if goodput["tokens"]["trained"] != recorded:
        faults.append(f"{goodput['tokens']['trained']} tokens are trained, {recorded} recorded")
    if goodput["samples"] != len(rows):
        faults.append(f"{goodput['samples']} samples are trained, {len(rows)} recorded")
    return faults


def killed_at_random(run: KilledRun, *, kills: int, seed: int, report: Report = print) -> int:
    """Kill a run at random moments, with changing explorers; return the steps it ends at."""
    chosen = random.Random(seed)
    for number in range(1, kills + 1):
        moment, explorers = chosen.randrange(1, MOMENTS), chosen.choice((1, 1, 2, 3))
        began = time.monotonic()
        run.kill(1_000_000, explorers, moment)
        seconds = time.monotonic() - began
        report(f"kill {number}: after {moment} entries, {explorers} explorers, {seconds:.0f} s")
    steps = run.newest_checkpoint() + 4
    run.finish(steps)
    return steps


def differences(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not the same to the bit."""
    if first.keys() != other.keys():
        return sorted(first.keys() ^ other.keys())
    return [name for name, tensor in first.items() if not identical(tensor, other[name])]
