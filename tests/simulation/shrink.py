"""From a plan that fails to a short one that still does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.simulation.plan import Plan

MOST_TRIES = 400


def kind_of(violations: list[str]) -> str | None:
    """What kind of failure it is, in the words that do not change with names and times."""
    return re.sub(r"[\d.:'\-]+.*", "", violations[0]) if violations else None


def shrink(plan: Plan, fails: Callable[[Plan], list[str]]) -> Plan:
    """Leave out of the plan what its failure does not need."""
    kind, tries, again = kind_of(fails(plan)), 0, True
    while again and tries < MOST_TRIES:
        again = False
        for smaller in _smaller(plan):
            tries += 1
            if kind_of(fails(smaller)) == kind:
                plan, again = smaller, True
                break
            if tries >= MOST_TRIES:
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """The plan with one thing less, the largest things first."""
    last = max((save.step for save in plan.saves), default=0)
    if last > 1:
        yield plan._replace(saves=tuple(save for save in plan.saves if save.step != last))
    for field in ("faults", "outages", "saves"):
        values = getattr(plan, field)
        for number in range(len(values)):
            yield plan._replace(**{field: values[:number] + values[number + 1 :]})
    defaults = Plan._field_defaults
    plain = ("members", "group_idle", "follower", "slow", "pause", "batch", "snapshots")
    for field in (*plain, "strategy"):
        if getattr(plan, field) != defaults[field]:
            yield plan._replace(**{field: defaults[field]})
    if plan.members > 1:
        yield plan._replace(members=plan.members - 1)
    used = max((save.worker for save in plan.saves), default=-1) + 1
    if used < len(plan.workers):
        yield plan._replace(workers=plan.workers[:used])
    for number, save in enumerate(plan.saves):
        plainer = save._replace(seconds=0.1, ends="finished", name="model")
        for simple in (plainer, save._replace(worker=0)):
            if simple != save:
                saves = (*plan.saves[:number], simple, *plan.saves[number + 1 :])
                if len(set(saves)) == len(saves):
                    yield plan._replace(saves=saves)
