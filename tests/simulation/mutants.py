"""Planted bugs: what the simulation must find, or it would find nothing.

Each replaces a few words of the real code while it is in force. When the code no longer has
these words, its mutant says so and is to be planted anew.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.simulation.histories import HISTORIES
from tests.simulation.plan import draw
from tests.simulation.world import simulate
from trinity_events import replay
from trinity_events.core import announcements, fold
from trinity_events.core.fold_state import FoldState
from trinity_events.core.handlers import admission, saves
from trinity_events.log import MemoryEventLog
from trinity_events.log.memory.stream import MemoryGroup
from trinity_events.log.publishing import async_publisher
from trinity_events.reducer.leader import Leader
from trinity_events.reducer.reducer import Reducer
from trinity_events.reducer.timekeeper import Timekeeper
from trinity_events.subscriptions import group_member as members


class Change(NamedTuple):
    """A function, by the module or class that holds it, and the words to replace in it."""

    owner: Any
    name: str
    old: str
    new: str


class Mutant(NamedTuple):
    """One bug, what it is, and the seeds of which one has to find it."""

    name: str
    changes: tuple[Change, ...]
    seeds: range


def _mutant(name: str, seeds: int | range, *changes: tuple[Any, str, str, str]) -> Mutant:
    searched = seeds if isinstance(seeds, range) else range(seeds)
    return Mutant(name, tuple(Change(*change) for change in changes), searched)


MUTANTS = (
    _mutant(
        "a turn is granted to two groups at once",
        50,
        (admission, "request_turn", "if running is None or", "if True or running is None or"),
    ),
    _mutant(
        "a turn that ends is not passed on",
        50,
        (
            saves,
            "end_attempt",
            "_grant_turns(fold, admission.release_turn(state, save_id))",
            "admission.release_turn(state, save_id)",
        ),
    ),
    _mutant(
        "a failed save keeps its turn",
        300,
        (saves, "_fail_attempt", "end_attempt(fold, save_id)", "pass"),
    ),
    _mutant(
        "grants are not told to those who wait",
        50,
        (MemoryEventLog, "commit", "self._grant(commit.grants)", "pass"),
    ),
    _mutant(
        "a lease that lapses is ignored",
        300,
        (Timekeeper, "leases", "now - beats[name] >= watched[name].lease", "False"),
    ),
    _mutant(
        "a new leader does not wait for a lease before it believes that somebody is dead",
        1000,
        (Timekeeper, "leases", "beats.get(name, now)", "beats.get(name, -10.0)"),
    ),
    _mutant(
        "a leader's word is not fenced",
        1000,
        (MemoryEventLog, "append_leading", "if self._leads(token) else None", ""),
    ),
    _mutant(
        "a commit compares neither fence nor position",
        1000,
        (
            MemoryEventLog,
            "commit",
            "if not self._leads(commit.token) or commit.after != self._position:",
            "if False:",
        ),
    ),
    _mutant(
        "a step is sent again after a lost reply, and nobody compares positions",
        1000,
        (MemoryEventLog, "commit", "or commit.after != self._position", ""),
        (
            Reducer,
            "_send_commit",
            "if not await self._log.commit(commit):",
            "import redis\n    try:\n        taken = await self._log.commit(commit)\n"
            "    except redis.ConnectionError:\n        taken = await self._log.commit(commit)\n"
            "    if not taken:",
        ),
    ),
    _mutant(
        "what was folded before is not loaded",
        50,
        (
            replay,
            "load_monitor",
            "monitor.fold(batch, decode)",
            "monitor.state.position = reached",
        ),
    ),
    _mutant(
        "what was folded before is announced again",
        50,
        (Reducer, "_load", "return loaded.monitor", "self._after = '0-0'; return loaded.monitor"),
    ),
    _mutant(
        "a lead that is lost is not taken again",
        300,
        (Leader, "acquire", "await anyio.sleep(delay)", "await anyio.sleep_forever()"),
    ),
    _mutant(
        "nothing is ever overdue",
        300,
        (Timekeeper, "deadlines", "if remaining <= 0:", "if False:"),
    ),
    _mutant(
        "a pointer goes back to a step that finishes late",
        300,
        (announcements, "_announce_if_complete", "pointer.at > at", "False"),
    ),
    _mutant(
        "a step is ready with as many saves as were registered, whatever their ranks say",
        300,
        (FoldState, "ensure_slot", "if ranks is not None:", "if False:"),
    ),
    _mutant(
        "events of an older epoch are believed",
        1000,
        (fold, "_admit_epoch", "return False", "return envelope.epoch < epoch"),
    ),
    _mutant(
        "an event that was not taken is dropped in silence",
        300,
        (async_publisher, "_within", "fault = error", "return ''"),
    ),
    _mutant(
        "an event is acknowledged before it is handled",
        1000,
        (members, "consume_group", "yield delivered", "await delivered.ack(); yield delivered"),
    ),
    _mutant(
        "what a member left pending is taken over by nobody",
        1000,
        (members._Member, "_claim", "return claimed.entries", "return []"),
    ),
    _mutant(
        "what a member was given is not remembered",
        1000,
        (MemoryGroup, "give", "self.pending[self.last] = Pending(entry, member, now)", "pass"),
    ),
)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The code with the bug in it."""
    with ExitStack() as patches:
        for change in mutant.changes:
            changed = _changed(change)
            for holder in _holders(change):
                patches.enter_context(patch.object(holder, change.name, changed))
        yield


def _holders(change: Change) -> list[Any]:
    """Where the function is looked up: its owner, and modules that imported it by name."""
    function = getattr(change.owner, change.name)
    importers = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("trinity_events.") and vars(module).get(change.name) is function
    ]
    return importers or [change.owner]


def _changed(change: Change) -> Any:
    function = getattr(change.owner, change.name)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(change.old) != 1:
        raise AssertionError(
            f"{function.__qualname__} has {change.old!r} {source.count(change.old)} times: "
            "plant the mutant anew"
        )
    scope: dict[str, Any] = {}
    code = compile(source.replace(change.old, change.new), "<mutant>", "exec", 0x1000000)
    exec(code, function.__globals__, scope)
    return scope[change.name]


def found_by(mutant: Mutant) -> str | None:
    """What finds the bug first: a history, or one of its seeds."""
    with planted(mutant):
        for number, plan in enumerate(HISTORIES, 1):
            if simulate(plan):
                return f"history {number}"
        for seed in mutant.seeds:
            if simulate(draw(seed)):
                return f"seed {seed}"
    return None
