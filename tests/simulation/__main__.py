"""``python -m tests.simulation``: as many seeds as one likes, and then the planted bugs.

Half of the time goes to rollouts, which have a simulation of their own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from tests.simulation import rollout_mutants, rollouts
from tests.simulation.mutants import MUTANTS, found_by, planted
from tests.simulation.plan import draw
from tests.simulation.shrink import shrink
from tests.simulation.world import simulate

SECONDS = 60.0
SEEDS = 5_000
_TELL_EVERY = 5.0
_MOST_FAILURES = 3


def main() -> int:
    arguments = _arguments()
    if arguments.seed is not None:
        run_seed = _run_rollout_seed if arguments.rollouts else _run_seed
        return run_seed(arguments.seed, arguments.mutant)
    failures = 0
    if not arguments.mutants:
        if not arguments.rollouts:
            failures += _many(arguments, "seeds", lambda seed: simulate(draw(seed)), _tell_failure)
        failures += _many(arguments, "seeds of rollouts", rollouts.simulate, _tell_rollouts)
    if arguments.mutants or not arguments.seeds:
        failures += _find_mutants()
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, help="how many; without it, 5,000 or one minute")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one, and what it says")
    parser.add_argument("--mutant", help="with this planted bug (a part of its name)")
    parser.add_argument("--rollouts", action="store_true", help="only the rollouts")
    parser.add_argument("--mutants", action="store_true", help="only look for planted bugs")
    return parser.parse_args()


def _many(
    arguments: argparse.Namespace,
    what: str,
    run: Callable[[int], list[str]],
    tell: Callable[[int], None],
) -> int:
    """Run seed after seed; returns how many failed."""
    began = reported_at = time.monotonic()
    used = time.process_time()
    most = arguments.seeds or SEEDS
    done = failures = 0
    for seed in range(arguments.first, arguments.first + most):
        if run(seed):
            failures += 1
            tell(seed)
        done += 1
        now = time.monotonic()
        if now - reported_at > _TELL_EVERY:
            reported_at = now
            _tell_progress(what, done, failures, time.process_time() - used)
        if failures == _MOST_FAILURES or (not arguments.seeds and now - began > SECONDS):
            break
    _tell_progress(what, done, failures, time.process_time() - used)
    return failures


def _tell_progress(what: str, done: int, failures: int, seconds: float) -> None:
    rate = 60 * done / max(seconds, 0.001)
    print(f"{done:,} {what}, {rate:,.0f} a minute of one core, {failures} failed", flush=True)


def _tell_failure(seed: int) -> None:
    plan = draw(seed)
    print(f"\nseed {seed} failed; to run it again: python -m tests.simulation --seed {seed}")
    print(*simulate(plan), sep="\n")
    short = shrink(plan, simulate)
    print("As short as it gets, to be pasted into tests/simulation/histories.py:")
    print(f"    {short!r},")
    print(*simulate(short), sep="\n", flush=True)


def _tell_rollouts(seed: int) -> None:
    print(f"\nseed {seed} failed: python -m tests.simulation --rollouts --seed {seed}")
    print(*rollouts.simulate(seed), sep="\n", flush=True)


def _run_rollout_seed(seed: int, name: str | None) -> int:
    if name is not None:
        [mutant] = [candidate for candidate in rollout_mutants.MUTANTS if name in candidate.name]
        with planted(mutant):
            return _run_rollout_seed(seed, None)
    violations = rollouts.simulate(seed)
    print(*(violations or ["nothing went wrong"]), sep="\n")
    return 1 if violations else 0


def _run_seed(seed: int, name: str | None) -> int:
    if name is not None:
        [mutant] = [candidate for candidate in MUTANTS if name in candidate.name]
        with planted(mutant):
            return _run_seed(seed, None)
    violations = simulate(draw(seed))
    print(f"{draw(seed)!r}")
    if violations:
        _tell_failure(seed)
    else:
        print("nothing went wrong")
    return 1 if violations else 0


def _find_mutants() -> int:
    """Plant one bug after the other; returns how many were not found."""
    missed = 0
    searches = [(mutant, found_by) for mutant in MUTANTS]
    searches += [(mutant, rollout_mutants.found_by) for mutant in rollout_mutants.MUTANTS]
    for mutant, search in searches:
        by = search(mutant)
        missed += by is None
        print(f"{f'found by {by}' if by else 'NOT FOUND':24} {mutant.name}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
