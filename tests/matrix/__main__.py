"""``make matrix``: runs every sync method with every style, and says what each log shows.

Each combination is a run of ``trinity-events train`` with two explorers, and one that joins late. A
combination that has a result in the folder is not run again, so that the command goes on where it
was interrupted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from tests.support.redis_servers import servers
from tests.support.vllm_policies import create_vllm_policy
from trinity_events.system.signals import exit_on_signals
from trinity_workers.learning.policy import create_policy

from .combinations import Combination, combinations
from .matrix_run import Result, RunFailed, perform

FOLDER = Path("matrix-runs")
"""Folder of results, of the one that the command runs in."""


def main() -> int:
    """Run what was asked for; return 1 if anything was not as it must be."""
    options = _options()
    exit_on_signals()  # in order, so that no process remains
    chosen = [
        combination
        for combination in combinations()
        if any(text in combination.name for text in options.only)
    ]
    runnable = [each for each in chosen if find_spec(each.package) is not None]
    if left_out := len(chosen) - len(runnable):
        print(f"{left_out} combinations were left out: vLLM is not installed (make matrix-vllm)")
    chosen, failed = runnable, 0
    for result in _results(chosen, options.folder):
        print(f"{result.line()}; {result.seconds:.0f} s", flush=True)
        failed += bool(result.faults)
    print(f"{len(chosen) - failed} of {len(chosen)} combinations are as they must be")
    return 1 if failed else 0


def _results(chosen: list[Combination], folder: Path) -> Iterator[Result]:
    """Yield the result of each combination: the one in the folder, or that of a new run."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="matrix-") as name,
        servers(Path(name), 1) as [server],
    ):
        for combination in chosen:
            file = folder / f"{combination.name}.json"
            if file.is_file():
                yield msgspec.json.decode(file.read_bytes(), type=Result)
                continue
            result = _performed(
                combination, Path(name) / combination.name, Path(name) / "model", server.url
            )
            if not result.faults:
                file.write_bytes(msgspec.json.encode(result))
            yield result


def _performed(combination: Combination, folder: Path, model: Path, redis_url: str) -> Result:
    model = model / combination.rollouts
    if not (model / "config.json").is_file():
        if combination.rollouts == "vllm":  # it takes no heads as small as the demo's on a CPU
            create_vllm_policy(model, kv_heads=2)
        else:
            create_policy(model, seed=0)
    try:
        return perform(combination, folder, model, redis_url)
    except RunFailed as error:
        return Result(
            name=combination.name,
            steps=0,
            applied={},
            joined_at=None,
            stalest=0,
            holds=[],
            faults=[str(error)],
            seconds=0.0,
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="runs whose names contain it"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="results, one file a run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
