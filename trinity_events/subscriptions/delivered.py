"""Event as a subscriber gets it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from msgspec import Struct

from trinity_schemas import Envelope

E = TypeVar("E", bound=Struct)


class Delivered(Generic[E]):
    """Event as a subscriber gets it; attributes of the event can be read on it."""

    def __init__(
        self,
        entry_id: str,
        envelope: Envelope,
        event: E,
        ack: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.entry_id = entry_id
        """Position of the event, from which a subscription may start again."""
        self.envelope = envelope
        self.event = event
        self._ack = ack

    async def ack(self) -> None:
        """Acknowledge the event to the group; without a group, do nothing."""
        if self._ack is not None:
            await self._ack()

    def __getattr__(self, name: str) -> Any:
        # Without this, the line below would ask for `event` again, without an end.
        if name == "event":  # not set yet, for example while it is copied
            raise AttributeError(name)
        return getattr(self.event, name)

    def __repr__(self) -> str:
        return f"<{self.entry_id} {self.event!r}>"
