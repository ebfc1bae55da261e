"""Goodput of runs with real processes and planted waste: each is within two points of the truth.

Rewards are the witnesses: they note their times, and the tokens of each answer.
"""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.run_processes import ended, small_run
from tests.support.saved_checkpoints import ready_checkpoints
from tests.support.sessions import kill_session
from tests.support.waits import PATIENCE, wait_until
from trinity_events.record.reader import RolloutRecord
from trinity_schemas import Envelope, PhasesMeasured, StepTrained

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(600)]

REWARD = """
import os, time, zlib

def reward(question, answer):
    began = time.time()
    time.sleep({seconds})
    with open({file!r}, "a") as file:
        prompt = zlib.crc32(str(question.prompt).encode())
        explorer = os.environ.get("WITNESS", "-")
        file.write(f"{{began}} {{time.time()}} {{answer.tokens}} {{explorer}} {{prompt}}\\n")
    # Groups of some questions have equal rewards, and are filtered.
    return 1.0 if sum(map(ord, str(question.prompt))) % 3 == 0 else float(began * 1000 % 7)
"""


class Judged(NamedTuple):
    """Answer that a reward has noted."""

    began: float
    ended: float
    tokens: int
    explorer: str
    """Value of WITNESS in the environment of its explorer."""
    prompt: str


class Planted:
    """Run whose reward takes its time."""

    def __init__(self, folder: Path, policy: Path, *, seconds: float, **sections) -> None:
        self._file = folder / "judged"
        (folder / "reward.py").write_text(REWARD.format(seconds=seconds, file=str(self._file)))
        rewards = {"function": "./reward.py:reward"}
        self.config = str(small_run(folder, policy, rewards=rewards, **sections))

    def judged(self) -> list[Judged]:
        if not self._file.exists():
            return []
        # The last line may be under way.
        lines = self._file.read_text().split("\n")[:-1]
        return [
            Judged(float(began), float(end), int(tokens), explorer, prompt)
            for began, end, tokens, explorer, prompt in map(str.split, lines)
        ]

    def judging(self) -> float:
        """Return the seconds in which at least one answer was judged."""
        total, until = 0.0, 0.0
        for began, end, *_ in sorted(self.judged()):
            total += max(0.0, end - max(began, until))
            until = max(until, end)
        return total


def read_goodput(processes) -> dict:
    """Return what the command prints; its sums are exact."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "trinity_events", "goodput", processes.run_id, "--json"),
            *("--checkpoint-root", str(processes.folder)),
        ],
        env=processes.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    goodput = json.loads(result.stdout)
    print(json.dumps({name: goodput[name] for name in goodput if name != "workers"}, indent=1))
    shares = [seconds / total_seconds(goodput) for seconds in goodput["seconds"].values()]
    assert sum(shares) * 100 == pytest.approx(100, abs=0.1)
    assert min(shares) >= 0 and min(goodput["tokens"].values()) >= 0
    return goodput


def total_seconds(goodput: dict) -> float:
    return sum(goodput["seconds"].values())


def seconds_of(goodput: dict, process: str, *fates: str) -> float:
    return sum(
        worker["seconds"].get(fate, 0.0)
        for worker in goodput["workers"]
        if worker["process"] == process
        for fate in fates
    )


def own_seconds(goodput: dict, process: str) -> float:
    return sum(
        sum(worker["seconds"].values())
        for worker in goodput["workers"]
        if worker["process"] == process
    )


def trained(processes) -> int:
    return sum(isinstance(entry.event, StepTrained) for entry in processes.log())


def reports(processes, process: str) -> list[Envelope]:
    return [
        entry
        for entry in processes.log()
        if isinstance(entry.event, PhasesMeasured)
        and f"{entry.producer.role}-{entry.producer.rank}" == process
    ]


def test_a_slow_reward_and_filtered_groups_are_found_and_tokens_are_exact(
    processes, policy_folder, tmp_path
):
    planted = Planted(
        *(tmp_path, policy_folder),
        seconds=0.2,
        steps=5,
        explorer={"count": 1},
        algorithm={"filters": {"zero_variance": "resample"}},
        record={"rollouts": "all"},
    )
    began = time.monotonic()
    code, _, error = ended(processes.start("train", planted.config), 4 * PATIENCE)
    elapsed = time.monotonic() - began
    assert code == 0, error
    goodput = read_goodput(processes)
    # Of its own seconds: starts take most of all on a busy machine.
    own = own_seconds(goodput, "explorer-0")
    assert planted.judging() / own > 0.02
    judging = seconds_of(goodput, "explorer-0", "judging")
    assert judging / own == pytest.approx(planted.judging() / own, abs=0.02)
    names = {worker["process"] for worker in goodput["workers"]}
    writers = {"writer-0", "discards-writer-0"}
    assert names == {"trainer-0", "actor-0", "explorer-0", "reducer-0", *writers}
    assert seconds_of(goodput, "reducer-0", "folding") > 0
    for writer in writers:
        assert seconds_of(goodput, writer, "writing") > 0
    # The servers are the test's own.
    assert {"the log's server", "the chunk server"} < set(goodput["unmeasured"])
    for worker in goodput["workers"]:
        assert 0 < sum(worker["seconds"].values()) < elapsed
    # To the token: every answer was judged, and no process died.
    assert sum(goodput["tokens"].values()) == sum(judged.tokens for judged in planted.judged())
    assert goodput["tokens"]["filtered"] > 0
    assert goodput["samples"] == 5 * 16
    wastes = {waste["subject"]: waste for waste in goodput["waste"]}
    assert wastes["filtered"]["tokens"] == goodput["tokens"]["filtered"]
    # The record has the very answers: those of each fate have its tokens.
    record = RolloutRecord(processes.folder / processes.run_id, processes.run_id)
    steps, recorded = record.list_steps(discarded=True), Counter()
    for row in record.read_all(steps, ("ordinal", "sample", "fate", "turns")):
        policy = (turn["tokens"] for turn in row["turns"] if turn["role"] == "policy")
        recorded[row["fate"]] += sum(policy)
    assert recorded["trained"] == goodput["tokens"]["trained"]
    assert recorded["filtered"] == goodput["tokens"]["filtered"]


@pytest.mark.nightly(
    "core/test_goodput.py::test_an_old_checkpoint_costs_the_steps_that_are_trained_again"
)
def test_an_old_checkpoint_costs_the_steps_that_it_lacks(processes, policy_folder, tmp_path):
    planted = Planted(
        *(tmp_path, policy_folder),
        seconds=0.02,
        steps=1000,
        explorer={"count": 2},
        checkpoints={"interval": 4},
        rollouts={"claim_lease": 3.0},
    )
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = processes.start("train", planted.config, **quiet)

    def is_behind() -> bool:
        """Return True once some steps were trained after the newest checkpoint."""
        ready = ready_checkpoints(processes.redis_url, processes.run_id)
        return bool(ready) and trained(processes) >= ready[-1].step + 2

    wait_until(is_behind, patience=6 * PATIENCE)
    kill_session(run.pid)
    run.wait(PATIENCE)
    reached = trained(processes)
    steps = reached + 4
    again = processes.start("train", planted.config, "--set", f"steps={steps}")
    code, _, error = ended(again, 6 * PATIENCE)
    assert code == 0, error
    goodput = read_goodput(processes)
    [checkpoint] = [waste for waste in goodput["waste"] if waste["kind"] == "old-checkpoint"]
    events = [entry for entry in processes.log() if isinstance(entry.event, StepTrained)]
    resumed = int(checkpoint["subject"].split()[1])
    discarded = [entry for entry in events if entry.epoch == 1 and entry.event.step > resumed]
    assert checkpoint["tokens"] == sum(entry.event.tokens["trained"] for entry in discarded)
    assert checkpoint["tokens"] > 0
    current = [entry for entry in events if entry.epoch == 2 or entry.event.step <= resumed]
    assert goodput["tokens"]["trained"] == sum(entry.event.tokens["trained"] for entry in current)
    assert goodput["samples"] == steps * 16
    died = {waste["subject"] for waste in goodput["waste"] if waste["kind"] == "died"}
    everyone = {"trainer-0", "actor-0", "explorer-0", "explorer-1", "writer-0", "reducer-0"}
    assert died <= everyone


@pytest.mark.nightly(
    "core/test_goodput.py::test_a_dead_explorer_costs_its_time_and_what_it_had_under_way"
)
def test_idle_explorers_and_a_killed_one_are_found_while_the_run_goes_on(
    processes, policy_folder, tmp_path
):
    """The second explorer waits for weights for most of its time, until it is killed."""
    planted = Planted(
        *(tmp_path, policy_folder),
        seconds=0.3,
        steps=1_000_000,
        explorer={"groups_per_claim": 4, "wait_for_run": 0},
        rollouts={"claim_lease": 3.0, "prompts_per_step": 4},
        sync={"max_staleness": 0},
    )
    own = ("--config", planted.config)
    processes.start("reducer")
    trainer = processes.start("train", planted.config, "--parts", "trainer")
    processes.start("explorer", "--rank", "0", *own)
    began = time.time()
    victim = processes.start("explorer", "--rank", "1", *own)
    wait_until(lambda: reports(processes, "explorer-1"), patience=4 * PATIENCE)
    before = trained(processes)
    wait_until(lambda: trained(processes) >= before + 6, patience=4 * PATIENCE)
    live = read_goodput(processes)
    assert {worker["process"] for worker in live["workers"]} >= {"explorer-0", "explorer-1"}
    # Right after a report: what a process does after its last one is not known.
    heard = len(reports(processes, "explorer-1"))
    wait_until(lambda: len(reports(processes, "explorer-1")) > heard, patience=PATIENCE)
    victim.send_signal(signal.SIGKILL)
    killed = time.time()
    # The claim of the victim lapses, and its lease after that.
    wait_until(
        lambda: any(
            waste["kind"] == "died" and waste["subject"] == "explorer-1"
            for waste in read_goodput(processes)["waste"]
        ),
        patience=4 * PATIENCE,
    )
    trainer.terminate()
    assert ended(trainer)[0] == 143
    over = time.time()
    goodput = read_goodput(processes)
    # The signal ended the others, and they did not die.
    [cause] = [waste for waste in goodput["waste"] if waste["kind"] == "died"]
    assert cause["subject"] == "explorer-1"
    down = seconds_of(goodput, "explorer-1", "down", "lost")
    assert cause["seconds"] == pytest.approx(down)
    # Of the explorer's own place, by the clock of this test.
    planted_share, share = (
        (over - killed) / (over - began),
        down / own_seconds(goodput, "explorer-1"),
    )
    print(f"dead explorer: planted {planted_share:.1%}, found {share:.1%}")
    assert share == pytest.approx(planted_share, abs=0.02)
    assert reports(processes, "trainer-0")[-1].event.is_last
