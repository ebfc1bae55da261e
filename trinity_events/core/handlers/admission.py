"""Turns to save: groups of saves take turns, first come first served.

A group holds the saves that may run at once under the run's strategy: one save, the saves of one
process, or the saves of one node. When a group's turn comes, all its waiting saves start together.
A save that asks during its own group's turn joins it only if no other group waits, so that no
group keeps the turn for ever.
"""

from __future__ import annotations

from trinity_schemas import Producer, SaveRequested

from ..state import MonitorState


def is_limited(state: MonitorState) -> bool:
    """Return True if the current epoch's saves need a turn."""
    return state.strategy != "unrestricted"


def get_group(state: MonitorState, event: SaveRequested, producer: Producer) -> str:
    """Return the group that a request belongs to under the run's strategy."""
    process = event.process
    if state.strategy == "single_process":
        if process is None:
            return producer.incarnation
        return f"{process.host_id or process.host}/{process.pid}/{process.started}"
    if state.strategy == "single_node":
        # By the name: see docs/decisions/0048-hosts.md.
        return producer.node if process is None else process.host
    return event.save_id


def request_turn(state: MonitorState, save_id: str, group: str) -> list[str]:
    """Queue a save in its group; return the saves whose turn comes now."""
    if not is_limited(state):
        return [save_id]  # The strategy limits no save: it need not have asked.
    state.queue.setdefault(group, []).append(save_id)
    # All turns are of one group, so that any of them names it.
    running = next(iter(state.turns.values()), None)
    if running is None or (running == group and len(state.queue) == 1):
        return _next_group(state)
    return []


def release_turn(state: MonitorState, save_id: str) -> list[str]:
    """Remove a save that waits or has its turn; return the saves whose turn comes now."""
    group = state.turns.pop(save_id, None)
    if group is None:
        for waiting_group, waiting in state.queue.items():
            if save_id in waiting:
                waiting.remove(save_id)
                if not waiting:
                    del state.queue[waiting_group]
                break
        # Saves that it kept from joining the group that has the turn may join now.
        running = next(iter(state.turns.values()), None)
        alone = running is not None and list(state.queue) == [running]
        return _next_group(state) if alone else []
    # The group keeps the turn until the last of its saves has ended.
    return [] if state.turns or not state.queue else _next_group(state)


def _next_group(state: MonitorState) -> list[str]:
    group = next(iter(state.queue))
    granted = state.queue.pop(group)
    state.turns.update((save_id, group) for save_id in granted)
    return granted
