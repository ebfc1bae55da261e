"""First causes of a standstill: the ends of the chains of waits, and the state of what they name.

The log tells who waits for whom and which saves are missing. What no log can tell, such as a
process that is stopped or a reducer that is gone, comes as :class:`LiveFacts`.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct, field, structs

from trinity_schemas import Kind

from ..core.completeness import format_missing, missing_processes
from ..core.fold_state import format_producer, format_slot
from ..core.handlers.rollouts import format_exclusion
from ..core.handlers.runs import LAUNCHER
from ..core.handlers.waits import format_wait, open_waits
from ..core.pauses import format_pause, open_pauses
from ..core.state import KINDS, KindState, MonitorState, ProcessHost, ProcessLease
from ..system.counts import format_count
from .hosts import find_other_host, format_host, format_silence, is_judged, list_unseen

Condition = Literal["running", "stopped", "ended"]
"""State of a process of the host on which the question is asked."""

Reason = Literal[
    "server-full",
    "server-read-only",
    "closed",
    "no-reducer",
    "reducer-behind",
    "stopped",
    "ended",
    "silent",
    "failed",
    "waits",
    "missing",
    "no-explorer",
    "excluded",
    "paused",
    "unread-group",
    "held-checkpoint",
]
"""Kind of a cause.

`server-full`, `server-read-only`: the server of the log takes no entries. `closed`: the run ended
with an error. `no-reducer`: none leads. `reducer-behind`: the leader folds no entries, or copies no
reports. `stopped`, `ended`: a process that is waited for cannot continue. `silent`: the lease of
the trainer, or of explorers of a host, has expired, and no process is seen. `failed`: a kind of a
step failed. `waits`: a process waits for an object, or for a process that reports no wait.
`missing`: a save, a part, a commit or a registration has not come. `no-explorer`: rollouts have no
taker. `excluded`: the trainer takes no answers of an explorer. `unread-group`: a consumer group
acknowledges nothing. `held-checkpoint`: a reader holds a checkpoint.
"""

REDUCER = "reducer-0"
"""Name of a reducer's process, whichever reducer leads."""
BEHIND = 3_000
"""Milliseconds for which an entry is not folded before its reducer counts as behind."""
UNREAD = 5.0
"""Seconds without a call of a group's members before the group counts as unread."""
STANDSTILL = 5_000
"""Milliseconds for which a run waits before it counts as standing still, as its processes report.

It is the threshold of their reports (``trinity_events.diagnostics.waits.THRESHOLD``).
"""
_HARMLESS: frozenset[Reason] = frozenset(("closed", "failed", "unread-group", "held-checkpoint"))
"""Reasons of causes with which the training continues, or that views show by themselves."""
MOST_CAUSES = 8
"""Maximum causes that a view lists: the first ones hold up the others."""
_MOST_MISSING = 8
"""Maximum missing processes that a sentence names."""


class HostProcess(Struct, frozen=True, kw_only=True):
    """Process of the run on the host of the question."""

    pid: int
    condition: Condition


class GroupLag(NamedTuple):
    """Lag of a consumer group behind its stream, as a viewer may see it."""

    stream: str
    name: str
    members: int
    pending: int
    """Entries that members have read and not acknowledged."""
    last_delivered: str
    oldest_pending: str | None
    idle: float | None
    """Seconds since a member last read; None if there was none."""
    caught_up: bool
    lag: int | None = None
    """Entries that no member was given yet; None where the server does not know."""
    holder: str | None = None
    """Member with the most pending entries; None if nothing is pending."""


class CheckpointReader(Struct, frozen=True, kw_only=True):
    """Reader that holds a checkpoint."""

    step: int
    reader: str


class LiveFacts(Struct, frozen=True, kw_only=True):
    """Facts of one moment about the processes and the server of a run."""

    now: int
    """Milliseconds of the server's clock."""
    is_led: bool = True
    unfolded_since: int | None = None
    """Milliseconds of the oldest entry that no reducer has folded."""
    reports_since: int | None = None
    """Milliseconds of the oldest report of an explorer that no reducer has copied to the events."""
    server_fault: tuple[Reason, str] | None = None
    """Reason for which the server takes no entries, in words too."""
    processes: dict[str, HostProcess] = field(default_factory=dict)
    """Processes of this host by role and rank."""
    heard: dict[str, int] = field(default_factory=dict)
    """Milliseconds of the last entry of each process, as far as the end of the log tells."""
    groups: tuple[GroupLag, ...] = ()
    readers: tuple[CheckpointReader, ...] = ()
    host: ProcessHost | None = None
    """Host of the question; None where its processes are all processes of the run."""
    leader_host: ProcessHost | None = None
    """Host of the reducer that leads, if it says so."""


class Cause(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reason for which a run, or a part of it, does not go on."""

    reason: Reason
    sentence: str
    process: str | None = None
    """Process at fault by role and rank, as far as it is known."""
    pid: int | None = None
    """Its process id, if it is on the host of the question."""
    host: str | None = None
    """Its host, if that is another than the host of the question."""
    step: int | None = None
    kind: Kind | None = None
    what: str | None = None
    """Object that is waited for, or missing."""
    waiting: str | None = None
    """Process that waits for it."""
    since: int | None = None
    """Milliseconds at which the wait began."""


class _Link(NamedTuple):
    """Wait of a process, or of a step, for others."""

    by: str
    what: str
    on: tuple[str, ...]
    since: int
    sentence: str
    step: int | None = None
    kind: Kind | None = None
    reason: Reason = "waits"
    is_outage: bool = False


class _End(NamedTuple):
    """End of a chain: a process without a wait, or a wait that names none."""

    process: str | None
    link: _Link
    depth: int


def find_causes(state: MonitorState, facts: LiveFacts) -> list[Cause]:
    """Return the causes for which a run does not continue, the first cause first.

    There may be thousands: a view lists :data:`MOST_CAUSES` of those that it selects.
    """
    # Of a run that ended, only its error counts: its open waits are left over.
    if state.closed is not None:
        return list(_closed(state))
    # First: a process of another host, or of an earlier launch, must be blamed for nothing.
    facts = structs.replace(facts, processes=_select_judged(state, facts))
    links = _links(state, facts.now)
    ends = sorted(_ends(links), key=lambda end: _blame(end, facts))
    excluded = list(_check_excluded(state))
    # Without another explorer, nothing else can end the trainer's wait for rollouts.
    runs = set(_running_explorers(state))
    first = excluded if state.excluded.keys() >= runs else []
    lost = list(_check_lost_explorers(state, facts))
    awaited = [_cause(end, state, facts) for end in ends]
    named = {(cause.reason, cause.process) for cause in awaited}
    causes = [
        *_check_server(facts),
        # One cause, not two: the reducer of a launcher ends with it.
        *(_check_launcher(state, facts) or _check_reducer(state, facts)),
        *_check_trainer(state, facts),
        # Lost explorers come first where none is left; else the run goes on without them.
        *([] if runs else lost),
        *first,
        *awaited,
        # An explorer that is waited for has its cause already, with the wait.
        *(
            cause
            for cause in _check_explorers(state, facts)
            if (cause.reason, cause.process) not in named
        ),
        *lost,
        *_check_pauses(state, facts),
        *excluded,
        *_check_groups(facts),
        *_check_readers(facts),
    ]
    return list(
        # Excluded and lost explorers may be listed twice: their first place counts.
        {(cause.reason, cause.process, cause.what, cause.step): cause for cause in causes}.values()
    )


def is_standstill(cause: Cause, now: int) -> bool:
    """Return True for a cause that holds up the run, and no longer passes by itself at once."""
    return cause.reason not in _HARMLESS and is_lasting(cause, now)


def is_lasting(cause: Cause, now: int) -> bool:
    """Return True if a cause is no wait of a moment, such as every step has."""
    return cause.since is None or now - cause.since >= STANDSTILL


def select_processes(state: MonitorState, facts: LiveFacts) -> dict[str, HostProcess]:
    """Return the run's processes on the host of the question, without explorers that stopped.

    Processes of an earlier launch of the run are left out, as those on other hosts are.
    """

    def is_past(name: str, process: HostProcess) -> bool:
        explorer = state.explorers.get(name)
        is_explorer = name.startswith("explorer-")
        return (
            process.condition == "ended"
            and is_explorer
            and (explorer is None or explorer.status == "stopped")
        )

    return {
        name: process
        for name, process in _select_judged(state, facts).items()
        if not is_past(name, process)
    }


def find_unseen(state: MonitorState, facts: LiveFacts) -> dict[str, list[str]]:
    """Return the processes of an open run that the host of the question cannot see, by host."""
    return list_unseen(state, _locate(state, facts), facts.host)


def _locate(state: MonitorState, facts: LiveFacts) -> Mapping[str, ProcessHost]:
    """Return the hosts of the run's processes, without a copy: there may be thousands."""
    leader = {} if facts.leader_host is None else {REDUCER: facts.leader_host}
    return ChainMap(leader, state.hosts)


def _select_judged(state: MonitorState, facts: LiveFacts) -> dict[str, HostProcess]:
    hosts = _locate(state, facts)
    return {
        name: process
        for name, process in facts.processes.items()
        if is_judged(hosts, facts.host, name, ended=process.condition == "ended")
    }


# --- the server, the reducer, and what no process waits for ---------------------------------------


def _closed(state: MonitorState) -> Iterator[Cause]:
    if state.closed_error is not None:
        sentence = f"The run ended ({state.closed}): {state.closed_error.rstrip('.')}."
        yield Cause(reason="closed", sentence=sentence, since=state.closed_at)


def _check_server(facts: LiveFacts) -> Iterator[Cause]:
    if facts.server_fault is not None:
        reason, words = facts.server_fault
        yield Cause(reason=reason, sentence=f"The server takes no entries: {words}.")


def _check_launcher(state: MonitorState, facts: LiveFacts) -> list[Cause]:
    """Return the death of a run's launcher, with which its reducer ends too.

    A run that is led was started again, maybe on another host.
    """
    name = LAUNCHER
    process = facts.processes.get(name)
    if process is None or process.condition != "ended" or facts.is_led:
        return []
    how = f"Continue it with: {state.command}" if state.command else "Start it again under its name"
    sentence = (
        f"The run was killed: {name} (process {process.pid} of this host) has ended without "
        f"closing it. {how}"
    )
    return [Cause(reason="ended", sentence=sentence, process=name, pid=process.pid)]


def _check_reducer(state: MonitorState, facts: LiveFacts) -> Iterator[Cause]:
    name = REDUCER
    process = facts.processes.get(name)
    pid = None if process is None else process.pid
    since = facts.unfolded_since
    reports = facts.reports_since
    behind = any(at is not None and facts.now - at >= BEHIND for at in (since, reports))
    if facts.is_led and not behind:
        return
    words = "" if since is None else f"; entries are not folded for {_format_age(facts.now, since)}"
    if reports is not None:
        words += f"; reports of explorers wait for it for {_format_age(facts.now, reports)}"
    last = f"; the last one, {_format_process(name, process)}" if process is not None else ""
    last += "".join(
        f"; {format_wait(wait, facts.now)[:-1]}"
        for wait in open_waits(state, facts.now)
        if wait.by == name
    )
    if facts.is_led:
        sentence = f"The reducer that leads run {state.run_id} is behind{words}{last}."
        oldest = min(at for at in (since, reports) if at is not None)
        yield Cause(reason="reducer-behind", sentence=sentence, process=name, pid=pid, since=oldest)
    else:
        sentence = (
            f"No reducer leads run {state.run_id}, so that no step becomes ready{words}{last}."
        )
        yield Cause(reason="no-reducer", sentence=sentence, process=name, pid=pid, since=since)


def _check_trainer(state: MonitorState, facts: LiveFacts) -> Iterator[Cause]:
    """Yield a trainer whose lease has expired, as what is seen of its process if it is here."""
    lease = state.silent_trainer
    if lease is None:
        return
    name = format_producer(lease.holder)
    process = facts.processes.get(name)
    reason: Reason = "silent"
    sentence = format_silence([lease])
    if process is not None and process.condition != "running":
        reason, sentence = process.condition, f"{_format_process(name, process)}."
    yield Cause(
        reason=reason,
        sentence=sentence,
        process=name,
        pid=None if process is None else process.pid,
        host=_format_other_host(state, facts, name),
        since=lease.silent_at,
    )


def _check_explorers(state: MonitorState, facts: LiveFacts) -> Iterator[Cause]:
    """Yield explorers of this host that cannot go on, and that no process waits for."""
    for name, explorer in state.explorers.items():
        process = facts.processes.get(name) if explorer.status != "stopped" else None
        if process is not None and process.condition != "running":
            yield Cause(
                reason=process.condition,
                sentence=f"{_capitalize_step(_format_process(name, process))}.",
                process=name,
                pid=process.pid,
            )


def _check_pauses(state: MonitorState, facts: LiveFacts) -> Iterator[Cause]:
    """Yield explorers whose engines stand still for a version."""
    for paused in open_pauses(state):
        name, pause = paused
        yield Cause(
            reason="paused",
            sentence=format_pause(paused, facts.now),
            process=name,
            step=pause.version.step,
            since=pause.since,
        )


def _check_lost_explorers(state: MonitorState, facts: LiveFacts) -> Iterator[Cause]:
    """Yield explorers whose leases have expired, by host, if their processes are not seen here."""
    lost: dict[tuple[str, str | None], list[ProcessLease]] = {}
    for name, explorer in state.explorers.items():
        lease, process = explorer.lease, facts.processes.get(name)
        if lease is None or lease.silent_at is None:
            continue
        if process is None or process.condition == "running":
            host = _format_other_host(state, facts, name)
            lost.setdefault((lease.holder.node, host), []).append(lease)
    # By host: when a host or its link fails, hundreds of explorers are one cause.
    for (_, host), leases in lost.items():
        yield Cause(
            reason="silent",
            sentence=format_silence(leases),
            process=format_producer(leases[0].holder),
            host=host,
            since=min(lease.silent_at for lease in leases if lease.silent_at is not None),
        )


def _check_excluded(state: MonitorState) -> Iterator[Cause]:
    for name, excluded in state.excluded.items():
        sentence = f"{format_exclusion(name, excluded)}."
        yield Cause(reason="excluded", sentence=sentence, process=name, since=excluded.at)


def _check_groups(facts: LiveFacts) -> Iterator[Cause]:
    for group in facts.groups:
        # A group that no member has read for has no idle time; one that lacks nothing may be idle.
        if group.idle is None or group.idle < UNREAD or not (group.pending or group.lag):
            continue
        entries = format_count(group.pending, "entry", "entries")
        member = "" if group.holder is None else f", most of them of member {group.holder}"
        yield Cause(
            reason="unread-group",
            sentence=(
                f"Consumer group {group.name} of the {group.stream} has read nothing for "
                f"{group.idle:.0f} s, with {entries} that it has not acknowledged"
                f"{member}."
            ),
            process=group.holder,
            what=group.name,
            since=facts.now - round(1000 * group.idle),
        )


def _check_readers(facts: LiveFacts) -> Iterator[Cause]:
    for hold in facts.readers:
        yield Cause(
            reason="held-checkpoint",
            sentence=f"Reader {hold.reader} holds the checkpoint of step {hold.step}, which stays.",
            process=hold.reader,
            step=hold.step,
        )


# --- the graph of waits -------------------------------------------------------------------------


def _links(state: MonitorState, now: int) -> list[_Link]:
    steps = [*_step_links(state, now)]
    nodes = {link.step: [other.by for other in steps if other.step == link.step] for link in steps}
    return [*_reported(state, now, nodes), *_turns(state), *steps]


def _reported(state: MonitorState, now: int, nodes: dict[int | None, list[str]]) -> Iterator[_Link]:
    waits = open_waits(state, now)
    in_outage = {wait.by for wait in waits if wait.is_outage}
    for wait in waits:
        on = tuple(name for name in wait.waits_for if name != wait.by)
        # A process that waits for itself, such as for its own save, is an end.
        is_own = bool(wait.waits_for) and not on
        of_step = () if is_own or wait.step is None else tuple(nodes.get(wait.step, ()))
        sentence = format_wait(wait, now)
        names_cause = wait.waits_for or wait.is_outage
        if on or of_step or names_cause or not wait.by.startswith("trainer"):
            # The step names its missing ranks, which are nearer to the cause than the trainer.
            yield _Link(
                *(wait.by, wait.what, of_step or on, wait.since, sentence, wait.step),
                is_outage=wait.is_outage,
            )
            continue
        if wait.by in in_outage:
            continue  # It waits for the end of the outage too, which is no explorer's fault.
        # A trainer that names no process waits for any explorer: if none runs, for the lost ones,
        # which may be stopped processes of this host.
        explorers = tuple(_running_explorers(state)) or tuple(
            name for name, explorer in state.explorers.items() if explorer.is_lost
        )
        reason: Reason = "waits" if explorers or wait.step is not None else "no-explorer"
        yield _Link(wait.by, wait.what, explorers, wait.since, sentence, wait.step, None, reason)


def _turns(state: MonitorState) -> Iterator[_Link]:
    """Yield the saves that wait for their turn, each for the processes that have the turn."""
    having = tuple(
        _name(attempt.slot.role, attempt.slot.rank)
        for save_id in state.turns
        if (attempt := state.attempts.get(save_id)) is not None
    )
    for save_id in (queued_id for queued in state.queue.values() for queued_id in queued):
        attempt = state.attempts.get(save_id)
        if attempt is not None and having:
            by = _name(attempt.slot.role, attempt.slot.rank)
            what = f"its turn to save {format_slot(attempt.slot)}"
            on = tuple(name for name in having if name != by)
            sentence = f"{by} waits for {what}, which {', '.join(having)} has."
            yield _Link(by, what, on, attempt.since, sentence, attempt.slot.step, attempt.slot.kind)


def _step_links(state: MonitorState, now: int) -> Iterator[_Link]:
    for step, step_state in sorted(state.steps.items()):
        for kind in KINDS:
            kind_state = step_state.kinds.get(kind)
            if kind_state is None or kind_state.outcome is not None or kind_state.compacted:
                continue
            if kind_state.is_failed and _is_overcome(state, step, kind):
                continue
            on = tuple(_at_fault(state, step, kind, kind_state))
            by = f"step {step} {kind}"
            lacks = ", ".join(format_missing(step_state, kind, now, _MOST_MISSING)) or "nothing"
            # From the commit on: before it, saves may still be dispatched and nothing is late.
            since = (
                kind_state.committed_at
                if kind_state.committed_at is not None
                else _begun(state, step, kind)
            )
            if kind_state.is_failed:
                sentence = f"Step {step} {kind} FAILED: {(kind_state.failure or '').rstrip('.')}."
            else:
                sentence = f"Step {step} {kind} waits for {lacks}."
            reason: Reason = "failed" if kind_state.is_failed else "missing"
            what = (kind_state.failure or lacks) if kind_state.is_failed else lacks
            yield _Link(by, what, on, since or now, sentence, step, kind, reason)


def _at_fault(state: MonitorState, step: int, kind: Kind, kind_state: KindState) -> Iterable[str]:
    """Return the processes whose saves, parts or word a kind of a step lacks."""
    if kind_state.is_failed:
        failed = [
            slot.slot for slot in kind_state.slots.values() if slot.failed and slot.proof is None
        ]
        if failed:
            return [_name(slot.role, slot.rank) for slot in failed]
    # The role that publishes, which only the attempts name.
    role = next(
        (
            attempt.slot.role
            for attempt in state.attempts.values()
            if attempt.slot.step == step and attempt.slot.kind == "weights"
        ),
        "actor",
    )
    return missing_processes(state.steps[step], kind, role)


def _is_overcome(state: MonitorState, step: int, kind: Kind) -> bool:
    """Return True if a later step of a kind is ready, so that its failure holds up nothing."""
    pointer = state.ready.get(kind)
    return pointer is not None and (pointer.at.epoch, pointer.at.step) > (state.epoch, step)


def _begun(state: MonitorState, step: int, kind: Kind) -> int | None:
    begun = [
        attempt.since
        for attempt in state.attempts.values()
        if attempt.slot.step == step and attempt.slot.kind == kind
    ]
    return min(begun, default=None)


def _ends(links: Sequence[_Link]) -> list[_End]:
    """Return the ends of all chains, each with the number of waits before it.

    Each wait is walked once, so that the cost is linear in waits and names.
    """
    by: dict[str, list[_Link]] = {}
    for link in links:
        # A process may have several waits open at once, from several threads.
        by.setdefault(link.by, []).append(link)
    ends: list[_End] = []
    walked_ids: set[int] = set()

    def walk(link: _Link, depth: int) -> None:
        if id(link) in walked_ids:
            return  # a circle, or a wait that two others lead to
        walked_ids.add(id(link))
        for name in link.on:
            if name not in by:
                ends.append(_End(name, link, depth))
            for deeper in by.get(name, ()):
                walk(deeper, depth + 1)
        # Other waits of a process lead further, but to nothing outside of the run.
        if not link.on and (link.is_outage or not any(other.on for other in by[link.by])):
            ends.append(_End(None, link, depth))

    named = {name for link in links for name in link.on}
    # Roots first; a circle has none, and is entered at its oldest wait.
    for link in sorted(links, key=lambda link: (link.by in named, link.since)):
        walk(link, 0)
    # Only circles: each process waits for another one of them.
    if not ends and links:
        oldest = min(links, key=lambda link: link.since)
        ends.append(_End(next(iter(oldest.on), None), oldest, 0))
    return ends


def _blame(end: _End, facts: LiveFacts) -> tuple[int, int, int]:
    """Return the order of an end: lower is nearer to the first cause."""
    # Of an end that names no process, the one that waits is looked at.
    process = facts.processes.get(end.process or end.link.by)
    if process is not None and process.condition != "running":
        severity = 0
    elif end.link.reason == "failed":
        severity = 1
    else:
        severity = 2
    # The deeper end first: more waits lead to it.
    return severity, -end.depth, end.link.since


def _cause(end: _End, state: MonitorState, facts: LiveFacts) -> Cause:
    link, process = end.link, end.process
    culprit = process
    # A step is no process, and cannot be at fault.
    if culprit is None and not link.by.startswith("step "):
        culprit = link.by
    host_process = None if culprit is None else facts.processes.get(culprit)
    reason, sentence = link.reason, link.sentence
    if culprit is not None and host_process is not None and host_process.condition != "running":
        reason = host_process.condition
        sentence = f"{_capitalize_step(_format_process(culprit, host_process))}. {sentence}"
    elif process is not None and link.reason in ("waits", "missing"):
        heard = facts.heard.get(process)
        last_report = (
            ""
            if heard is None
            else f", and last told the log anything {_format_age(facts.now, heard)}"
        )
        ago = "" if heard is None else " ago"
        sentence += f" {process} reports no wait{last_report}{ago}: "
        sentence += "it computes, hangs or is cut off."
    elif link.reason == "no-explorer":
        sentence += f" No explorer {'runs any more' if state.explorers else 'has joined the run'}."
    host = _format_other_host(state, facts, culprit)
    if host is not None:
        sentence += f" {culprit} is on {host}, whose processes are not seen from this host."
    return Cause(
        reason=reason,
        sentence=sentence,
        process=culprit,
        pid=None if host_process is None else host_process.pid,
        host=host,
        step=link.step,
        kind=link.kind,
        what=link.what,
        waiting=link.by,
        since=link.since,
    )


def _format_other_host(state: MonitorState, facts: LiveFacts, name: str | None) -> str | None:
    """Return the host of a process as text, if it is another than that of the question."""
    if name is None or facts.host is None:
        return None
    host = find_other_host(_locate(state, facts), facts.host, name)
    return None if host is None else format_host(host, facts.host)


def _running_explorers(state: MonitorState) -> list[str]:
    return [name for name, explorer in state.explorers.items() if explorer.runs]


def _format_process(name: str, process: HostProcess | None) -> str:
    if process is None:
        return name
    words = {
        "running": "runs",
        "stopped": f"is stopped (kill -CONT {process.pid} lets it go on)",
        "ended": "has ended",
    }[process.condition]
    return f"{name} (process {process.pid} of this host) {words}"


def _capitalize_step(words: str) -> str:
    return words[:1].upper() + words[1:] if words.startswith("step ") else words


def _name(role: str, rank: int) -> str:
    return f"{role}-{rank}"


def _format_age(now: int, since: int) -> str:
    return f"{max(0, now - since) / 1000:.1f} s"
