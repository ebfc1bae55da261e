"""``make crash``: kills runs at random moments (-9, everything), and checks how they end."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.redis_servers import servers

from .killed_run import (
    ASYNCHRONOUS,
    BY_FILES,
    ON_POLICY,
    KilledRun,
    differences,
    killed_at_random,
    warm_model,
)

STYLES = {"asynchronous": ASYNCHRONOUS, "by-files": BY_FILES}
"""Styles under which answers and their order differ from run to run."""


def main() -> int:
    """Run each style; return 1 if anything was not as it must be."""
    options = _options()
    print(f"seed {options.seed}, {options.kills} kills in each style, {options.ranks} ranks")
    with tempfile.TemporaryDirectory(prefix="crash-") as name, servers(Path(name), 1) as [server]:
        folder = Path(name)
        model = warm_model(folder / "model")
        faults = list(_faults(folder, model, server.url, options))
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


def _faults(
    folder: Path, model: Path, redis_url: str, options: argparse.Namespace
) -> Iterator[str]:
    began = time.monotonic()
    killed = KilledRun(folder, model, redis_url, "killed", ON_POLICY, ranks=options.ranks)
    steps = killed_at_random(killed, kills=options.kills, seed=options.seed)
    undisturbed = KilledRun(folder, model, redis_url, "undisturbed", ON_POLICY, ranks=options.ranks)
    undisturbed.finish(steps)
    yield from killed.faults(steps)
    weights = killed.weights(steps)
    yield from differences(weights, undisturbed.weights(steps))
    print(
        f"on-policy: {steps} steps, {len(weights)} tensors compared, "
        f"{killed.recomputed()} requests issued again, {time.monotonic() - began:.0f} s"
    )
    for number, name in enumerate(options.styles, 1):
        style = STYLES[name]
        began = time.monotonic()
        run = KilledRun(folder, model, redis_url, name, style, ranks=options.ranks)
        steps = killed_at_random(run, kills=options.kills, seed=options.seed + number)
        yield from run.faults(steps)
        print(
            f"{name}: {steps} steps, {run.recomputed()} requests issued again, "
            f"{time.monotonic() - began:.0f} s"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="kills of each run")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of the moments")
    parser.add_argument(
        *("--styles",), nargs="*", choices=[*STYLES], default=[*STYLES], help="after on-policy"
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the trainer")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
