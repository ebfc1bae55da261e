"""Goodput of runs with real processes and planted waste: each is within two points of the truth.

Rewards are the witnesses: they note their times, and the tokens of each answer.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.run_processes import ended, small_run
from tests.support.waits import PATIENCE

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(600)]

REWARD = """
import time

def reward(question, answer):
    began = time.time()
    time.sleep({seconds})
    with open({file!r}, "a") as file:
        file.write(f"{{began}} {{time.time()}} {{answer.tokens}}\\n")
    # Groups of some questions have equal rewards, and are filtered.
    return 1.0 if sum(map(ord, str(question.prompt))) % 3 == 0 else float(began * 1000 % 7)
"""


class Judged(NamedTuple):
    """Answer that a reward has noted."""

    began: float
    ended: float
    tokens: int


class Planted:
    """Run whose reward takes its time."""

    def __init__(self, folder: Path, policy: Path, *, seconds: float, **sections) -> None:
        self._file = folder / "judged"
        (folder / "reward.py").write_text(REWARD.format(seconds=seconds, file=str(self._file)))
        rewards = {"function": "./reward.py:reward"}
        self.config = str(small_run(folder, policy, rewards=rewards, **sections))

    def judged(self) -> list[Judged]:
        lines = self._file.read_text().splitlines()
        rows = (line.split() for line in lines)
        return [Judged(float(began), float(end), int(tokens)) for began, end, tokens in rows]

    def judging(self) -> float:
        """Return the seconds in which at least one answer was judged."""
        total, until = 0.0, 0.0
        for began, end, _ in sorted(self.judged()):
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


def test_a_slow_reward_and_filtered_groups_are_found_and_tokens_are_exact(
    processes, policy_folder, tmp_path
):
    planted = Planted(
        *(tmp_path, policy_folder),
        seconds=0.2,
        steps=5,
        explorer={"count": 1},
        algorithm={"filters": {"zero_variance": "resample"}},
    )
    began = time.monotonic()
    code, _, error = ended(processes.start("train", planted.config), 4 * PATIENCE)
    elapsed = time.monotonic() - began
    assert code == 0, error
    goodput = read_goodput(processes)
    total = total_seconds(goodput)
    assert planted.judging() / total > 0.05
    judging = seconds_of(goodput, "explorer-0", "judging")
    assert judging / total == pytest.approx(planted.judging() / total, abs=0.02)
    names = {worker["process"] for worker in goodput["workers"]}
    assert names == {"trainer-0", "actor-0", "explorer-0"}
    for worker in goodput["workers"]:
        assert 0 < sum(worker["seconds"].values()) < elapsed
    # To the token: every answer was judged, and no process died.
    assert sum(goodput["tokens"].values()) == sum(judged.tokens for judged in planted.judged())
    assert goodput["tokens"]["filtered"] > 0
    assert goodput["samples"] == 5 * 16
    wastes = {waste["subject"]: waste for waste in goodput["waste"]}
    assert wastes["filtered"]["tokens"] == goodput["tokens"]["filtered"]
