"""Command that runs benchmarks.

Usage: python -m benchmarks [NAME ...] [--size tiny|small|full] [--keep]
       python -m benchmarks --pages

Without a name it runs all benchmarks. With --keep it writes the figures to their page and to
docs/benchmarks. With --pages it runs none, and writes what pages begin with from the kept figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from types import ModuleType

from trinity_events.system.signals import exit_on_signals

from . import (
    control_plane,
    dashboard,
    dispatch,
    engines,
    engines_learning,
    explorers,
    fold,
    fused_loss,
    growth,
    latency,
    megatron_learning,
    megatron_memory,
    megatron_reshard,
    megatron_stream,
    pages,
    proof,
    record,
    replay,
    rollouts,
    verification,
    viewers,
    weights,
    weights_delta,
    weights_gpu,
    weights_redis,
    weights_transports,
)
from .environment import stage
from .measure import Noise, say
from .report import Report, keep, machine, show

BENCHMARKS: dict[str, ModuleType] = {
    "latency": latency,
    "fold": fold,
    "replay": replay,
    "control_plane": control_plane,
    "dashboard": dashboard,
    "viewers": viewers,
    "explorers": explorers,
    "growth": growth,
    "rollouts": rollouts,
    "record": record,
    "verification": verification,
    "proof": proof,
    "weights": weights,
    "weights_delta": weights_delta,
    "weights_redis": weights_redis,
    "weights_transports": weights_transports,
    "weights_gpu": weights_gpu,
    "megatron_stream": megatron_stream,
    "dispatch": dispatch,
    "engines": engines,
    "engines_learning": engines_learning,
    "megatron_reshard": megatron_reshard,
    "megatron_memory": megatron_memory,
    "megatron_learning": megatron_learning,
    "fused_loss": fused_loss,
}
SIZES = ("tiny", "small", "full")


def measure(name: str, size: str) -> Report:
    """Run one benchmark on a server of its own."""
    benchmark, noise, began = BENCHMARKS[name], Noise(), time.monotonic()
    say(f"{name}: {benchmark.TITLE} (about {benchmark.SIZES[size].takes})")
    with stage() as on:
        here = machine(on.server)
        noise.beat()
        rows, notes = benchmark.run(on, benchmark.SIZES[size], noise)
        noise.beat()
    return Report(
        name=name,
        title=benchmark.TITLE,
        size=size,
        rows=rows,
        notes=notes,
        machine=here,
        noise=noise.spread,
        seconds=time.monotonic() - began,
    )


def main() -> None:
    """Parse the arguments and run the benchmarks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure what the pipeline costs."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=" | ".join(BENCHMARKS))
    parser.add_argument("--size", choices=SIZES, default="full", help="how much to measure")
    parser.add_argument("--keep", action="store_true", help="write the figures to docs")
    parser.add_argument("--pages", action="store_true", help="write what pages begin with, only")
    given = parser.parse_args()
    if given.pages:
        pages.write()
        return
    unknown = sorted(set(given.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}: choose of {', '.join(BENCHMARKS)}")
    exit_on_signals()  # in order, so that no server and no process remains
    for name in given.names or BENCHMARKS:
        why = BENCHMARKS[name].missing() if hasattr(BENCHMARKS[name], "missing") else None
        if why is not None:
            left_out = f"{name} was left out: {why}"
            if given.names:
                sys.exit(left_out)
            say(left_out)
            continue
        report = measure(name, given.size)
        show(report)
        if given.keep:
            keep(report, BENCHMARKS[name].PLACE)
            pages.write()


if __name__ == "__main__":
    main()
