"""``make hosts``: a whole run on four hosts, and what each fault of a table does to it.

The trainer is on host a, explorers are on b and c, server and reducer on d. The clock of b is ten
minutes ahead, and that of c as much behind. One run meets the faults one after another.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support.run_processes import small_run
from trinity_events.system.signals import exit_on_signals

from .clocks import has_clocks
from .network import SHARED, HostProcess, explain_absence
from .stage import HostStage

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
BEGIN, END = "<!-- hosts: written by make hosts -->", "<!-- end of hosts -->"
APART = 600.0
_STEPS = 1_000_000
_WATCHED = 15.0
"""Seconds for which steps are counted."""


class Row(NamedTuple):
    """Fault, and what it did."""

    fault: str
    result: str


class Trial:
    """The run, and its faults."""

    def __init__(self, stage: HostStage) -> None:
        self.stage = stage
        self.network = stage.network
        self.trainer: HostProcess | None = None
        folder = self.network.shared / "run"
        folder.mkdir()
        from trinity_workers.learning.policy import create_policy

        create_policy(folder / "policy", seed=0)
        small_run(folder, SHARED / "run" / "policy", steps=_STEPS, sync={"transport": "redis"})

    def start_trainer(self) -> None:
        """Start the trainer, or start it again."""
        self.trainer = self.stage.start(
            "a", "train", str(SHARED / "run" / "small.yaml"), "--parts", "trainer", "--take-over"
        )

    def start_explorer(self, host: str) -> None:
        """Start an explorer, or start it again, under the rank of its host."""
        file = str(SHARED / "run" / "small.yaml")
        rank = str("bc".index(host))
        self.stage.start(host, "explorer", "--config", file, "--rank", rank)

    @property
    def step(self) -> int:
        """Steps that were taken."""
        ledger = self.stage.state().ledger
        return 0 if ledger is None else ledger.trained

    def seconds_until_next(self) -> float:
        """Return the seconds until the next step is taken."""
        reached = self.step
        return self.stage.seconds_until(
            lambda state: state.ledger is not None and state.ledger.trained > reached
        )

    def format_rate(self) -> str:
        """Return the steps of some seconds, as text."""
        reached = self.step
        time.sleep(_WATCHED)
        prompts = self.step - reached
        return f"{prompts / 4 / _WATCHED:.1f} steps/s"

    # --- the faults -------------------------------------------------------------------------

    def begin(self) -> Row:
        self.stage.seconds_until(
            lambda state: state.ledger is not None and state.ledger.trained > 8
        )
        for rank in (0, 1):
            self.stage.seconds_until(self.stage.is_explorer(rank, "running"))
        apart = "b and c 20 minutes apart" if has_clocks() else "no compiler: clocks are equal"
        return Row(f"none (clocks of {apart})", self.format_rate())

    def cut_trainer(self, seconds: float) -> Row:
        self.network["a"].cut()
        time.sleep(seconds)
        status = self.stage.state().trainer_status
        self.network["a"].heal()
        first = self.seconds_until_next()
        assert self.trainer is not None
        assert self.trainer.poll() is None
        self.stage.seconds_until(lambda state: state.trainer_status == "running")
        return Row(
            f"a cut off for {seconds:g} s",
            f"trainer {status} at its end, next step {first:.1f} s after it, same epoch",
        )

    def cut_explorer(self) -> Row:
        reached = self.step
        self.network["b"].cut()
        lost = self.stage.seconds_until(self.stage.is_explorer(0, "lost"))
        others = (self.step - reached) / 4
        self.network["b"].heal()
        back = self.stage.seconds_until(self.stage.is_explorer(0, "running"))
        return Row(
            "b cut off until it is lost",
            f"lost after {lost:.0f} s, {others:.0f} steps with c meanwhile; running {back:.1f} s "
            "after healing",
        )

    def switch_explorer_off(self) -> Row:
        reached = self.step
        self.network["b"].power_off()
        lost = self.stage.seconds_until(self.stage.is_explorer(0, "lost"))
        others = (self.step - reached) / 4
        cause = self.stage.find_silence("d")
        self.network["b"].boot()
        self.start_explorer("b")
        back = self.stage.seconds_until(self.stage.is_explorer(0, "running"))
        return Row(
            "b switched off and on",
            f"lost after {lost:.0f} s, {others:.0f} steps with c meanwhile; explain on d names "
            f"{cause['process']} on {cause['host']}; running {back:.0f} s after its start",
        )

    def impair(self, host: str, delay: float, loss: float) -> Row:
        with self.network[host].impaired(delay=delay, loss=loss):
            rate = self.format_rate()
        state = self.stage.state()
        assert state.closed is None
        return Row(
            f"{host} with {1000 * delay:g} ms each way and {100 * loss:g} % loss",
            f"{rate}; trainer {state.trainer_status}",
        )

    def switch_trainer_off(self) -> Row:
        self.network["a"].power_off()
        silent = self.stage.seconds_until(lambda state: state.trainer_status == "silent")
        cause = self.stage.find_silence("d")
        self.network["a"].boot()
        self.start_trainer()
        self.stage.seconds_until(lambda state: state.epoch == 2)
        first = self.stage.seconds_until(
            lambda state: state.ledger is not None and state.ledger.trained > 0
        )
        return Row(
            "a switched off and on, run started again",
            f"silent after {silent:.0f} s; explain on d names {cause['process']} on "
            f"{cause['host']}; epoch 2, first step {first:.0f} s after its opening",
        )


def play(stage: HostStage) -> list[Row]:
    """Return what each fault did to one run."""
    trial = Trial(stage)
    trial.start_trainer()
    for host in "bc":
        trial.start_explorer(host)
    faults: list[Callable[[], Row]] = [
        trial.begin,
        lambda: trial.cut_trainer(5),
        lambda: trial.cut_trainer(35),
        trial.cut_explorer,
        trial.switch_explorer_off,
        lambda: trial.impair("b", 0.0, 0.01),
        lambda: trial.impair("a", 0.05, 0.01),
        trial.switch_trainer_off,
    ]
    rows = []
    for fault in faults:
        rows.append(fault())
        print(" | ".join(rows[-1]), flush=True)
    return rows


def write_table(page: Path, rows: list[Row]) -> None:
    """Write the table between the marks of a page."""
    text = page.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    lines = [
        "| fault | result |",
        "|---|---|",
        *(f"| {fault} | {result} |" for fault, result in rows),
    ]
    page.write_text("\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"]))


def main() -> int:
    """Play the faults, and print or write their table."""
    parser = argparse.ArgumentParser(prog="make hosts", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    arguments = parser.parse_args()
    exit_on_signals()
    absence = explain_absence()
    if absence:
        print(absence, file=sys.stderr)
        return 1
    with HostStage({"b": APART, "c": -APART} if has_clocks() else {}) as stage:
        try:
            rows = play(stage)
        except BaseException:
            for log in sorted(stage.network.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
            raise
    if arguments.write:
        write_table(PAGE, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
