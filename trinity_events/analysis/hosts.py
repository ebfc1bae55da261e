"""Hosts of a run's processes, and what is seen of them from one of the hosts.

1. A process is judged by a process id only on the host that gave it.
2. Hosts are compared by identity, and named to people by name.
3. What cannot be seen from a host is named as such, with its host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..core.fold_state import format_producer
from ..core.handlers.runs import LAUNCHER
from ..core.state import MonitorState, ProcessHost, ProcessLease
from ..system.counts import format_count

_MOST_NAMED = 4
"""Processes of one host that a sentence names; the others are counted."""
_MOST_HOSTS = 8
"""Hosts that a sentence names; the others are counted."""


def is_judged(
    hosts: Mapping[str, ProcessHost], own: ProcessHost | None, name: str, *, ended: bool
) -> bool:
    """Return True if a process that was found here under a name is the run's process.

    Args:
        hosts: Hosts of the run's processes by role and rank.
        own: Host of the question; None where the caller sees all processes.
        name: Role and rank.
        ended: True if the process that was found has ended. A process that lives is the run's, if
            the log does not say otherwise; one that has ended may be of an earlier launch.
    """
    if own is None:
        return True
    host = hosts.get(name)
    if host is None:
        # Before its first event a process is taken to be where the run was opened.
        host = hosts.get(LAUNCHER) if ended else own
    # By identity: two hosts may have one name, and images copy machine ids (decision 48).
    return host is not None and host.host_id == own.host_id


def find_other_host(
    hosts: Mapping[str, ProcessHost], own: ProcessHost | None, name: str
) -> ProcessHost | None:
    """Return the host of a process if it is another than one's own."""
    host = hosts.get(name)
    return None if own is None or host is None or host.host_id == own.host_id else host


def list_unseen(
    state: MonitorState, hosts: Mapping[str, ProcessHost], own: ProcessHost | None
) -> dict[str, list[str]]:
    """Return the processes of an open run that are on other hosts, by the host as text."""
    unseen: dict[str, list[str]] = {}
    if state.closed is not None or own is None:
        return unseen
    for name, host in hosts.items():
        explorer = state.explorers.get(name)
        if host.host_id == own.host_id or (explorer is not None and explorer.status == "stopped"):
            continue
        unseen.setdefault(format_host(host, own), []).append(name)
    return unseen


def format_host(host: ProcessHost, own: ProcessHost) -> str:
    """Return a host as text, with its identity if it has the name of one's own host."""
    # The identity only where the name alone would say that it is this host.
    return f"{host.node} ({host.host_id})" if host.node == own.node else host.node


def format_unseen(unseen: Mapping[str, Collection[str]]) -> str:
    """Return the sentence that names the hosts whose processes cannot be seen; empty without."""
    if not unseen:
        return ""
    parts = []
    for host, names in list(unseen.items())[:_MOST_HOSTS]:
        first, more = sorted(names)[:_MOST_NAMED], len(names) - _MOST_NAMED
        parts.append(f"{host} ({', '.join(first)}{f' and {more} more' if more > 0 else ''})")
    if len(unseen) > _MOST_HOSTS:
        parts.append(format_count(len(unseen) - _MOST_HOSTS, "more host"))
    return f"Not seen from this host are the processes on {', '.join(parts)}: ask there too."


def format_silence(leases: Sequence[ProcessLease]) -> str:
    """Return the sentence on processes of one host whose leases have expired."""
    names, first = sorted(format_producer(lease.holder) for lease in leases), leases[0]
    more = len(names) - _MOST_NAMED
    shown = f"{', '.join(names[:_MOST_NAMED])}{f' and {more} more' if more > 0 else ''}"
    process, link = (
        ("its process has", "its") if len(names) == 1 else ("their processes have", "their")
    )
    verb = "is" if len(names) == 1 else "are"
    return (
        f"Nothing is heard of {shown} on {first.holder.node}, for a lease of {first.lease:g} s at "
        f"least: {process} ended or {verb} stopped, {link} host is off, or {link} link to the "
        "server is cut."
    )
