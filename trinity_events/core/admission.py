"""Whose turn it is to save: groups one after another, first come first served.

A group is what may save at once under the run's strategy: one save, the saves of one process, or
those of one node. When a group's turn comes, all that it has waiting go together. Whoever comes
while its own group has the turn joins it only while nobody of another group waits, so that no
group can keep the turn for ever.
"""

from __future__ import annotations

from trinity_schemas import Producer, SaveRequested

from .state import MonitorState


def limits(state: MonitorState) -> bool:
    """Whether the current epoch's saves need a turn at all."""
    return state.strategy != "unrestricted"


def group_of(state: MonitorState, event: SaveRequested, producer: Producer) -> str:
    """The group that a request belongs to under the run's strategy."""
    process = event.process
    if state.strategy == "single_process":
        if process is None:
            return producer.incarnation
        return f"{process.host}/{process.pid}/{process.started}"
    if state.strategy == "single_node":
        return producer.node if process is None else process.host
    return event.save_id


def ask(state: MonitorState, save_id: str, group: str) -> list[str]:
    """Let a save wait in its group; returns the saves whose turn has come by it."""
    if not limits(state):
        return [save_id]  # nobody limits it: it need not have asked
    state.queue.setdefault(group, []).append(save_id)
    running = next(iter(state.turns.values()), None)
    if running is None or (running == group and len(state.queue) == 1):
        return _next_group(state)
    return []


def leave(state: MonitorState, save_id: str) -> list[str]:
    """Take a save out, whether it waits or has its turn; returns whose turn has come by it."""
    group = state.turns.pop(save_id, None)
    if group is None:
        for waiting_group, waiting in state.queue.items():
            if save_id in waiting:
                waiting.remove(save_id)
                if not waiting:
                    del state.queue[waiting_group]
                break
        # Whoever it kept from joining the group that has the turn may do so now.
        running = next(iter(state.turns.values()), None)
        alone = running is not None and list(state.queue) == [running]
        return _next_group(state) if alone else []
    return [] if state.turns or not state.queue else _next_group(state)


def _next_group(state: MonitorState) -> list[str]:
    group = next(iter(state.queue))
    granted = state.queue.pop(group)
    state.turns.update((save_id, group) for save_id in granted)
    return granted
