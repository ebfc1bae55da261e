"""Weight versions that consumers refused, and the hosts that repeated refusals point to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trinity_schemas import Producer, VersionRefused

from .fold_state import format_producer
from .limits import LONGEST_REFUSAL
from .state import Refusal


def make_refusal(event: VersionRefused, producer: Producer, at: int) -> Refusal:
    """Return the refusal that the state keeps of an event; ``at`` is in milliseconds."""
    return Refusal(
        at=at,
        by=format_producer(producer),
        node=producer.node,
        version=event.version,
        rank=event.rank,
        chunk=event.chunk,
        check=event.check,
        reason=event.reason[:LONGEST_REFUSAL],
    )


def format_refusal(refusal: Refusal) -> str:
    """Return the refusal as a sentence."""
    reason = refusal.reason.rstrip(".")
    return (
        f"{refusal.by} on {refusal.node} refused the weights of step {refusal.version.step}: "
        f"{reason}."
    )


def suspects(refusals: Sequence[Refusal]) -> list[str]:
    """Return a sentence for each host that repeated refusals point to.

    If several hosts refuse one chunk, the fault is at the publisher or in the store. If the
    explorers of one host find several versions damaged, the fault is in that host's memory or
    network. A check that an engine fails says nothing of either: probes differ by kernels too.
    """
    sentences: list[str] = []
    at_source = _refused_by_several_hosts(refusals)
    for step, rank, chunk, nodes in at_source.values():
        sentences.append(
            f"Chunk {chunk} of rank {rank} of step {step} was refused on {nodes} hosts: this "
            f"points to failing memory where rank {rank} runs, or of the chunks' server."
        )
    # A fault at the source says nothing of the hosts that refused the chunk.
    others = [
        refusal
        for refusal in refusals
        if refusal.check is None and _place(refusal) not in at_source
    ]
    for node in dict.fromkeys(refusal.node for refusal in others):
        here = [refusal for refusal in others if refusal.node == node]
        versions = len({refusal.version for refusal in here})
        if versions > 1:
            sentences.append(
                f"{_listed(refusal.by for refusal in here)} on {node} refused {versions} versions: "
                f"this points to failing memory of {node}, or to its network. Test its memory, and "
                "move its processes to another host."
            )
    return sentences


def _refused_by_several_hosts(
    refusals: Sequence[Refusal],
) -> dict[object, tuple[int, int | None, int | None, int]]:
    """Return step, rank, chunk and number of hosts of each chunk that several hosts refused."""
    nodes: dict[object, set[str]] = {}
    last: dict[object, Refusal] = {}
    for refusal in refusals:
        if refusal.chunk is not None:
            nodes.setdefault(_place(refusal), set()).add(refusal.node)
            last[_place(refusal)] = refusal
    return {
        place: (last[place].version.step, last[place].rank, last[place].chunk, len(hosts))
        for place, hosts in nodes.items()
        if len(hosts) > 1
    }


def _place(refusal: Refusal) -> object:
    return refusal.version, refusal.rank, refusal.chunk


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
