"""Publisher of reported waits that keeps them."""

from trinity_events.errors import BufferFull


class PublishedWaits:
    """Publisher that keeps what is published, or refuses it."""

    def __init__(self):
        self.events = []
        self.refuses = False

    def publish(self, event):
        if self.refuses:
            raise BufferFull("run", "the event", "no room", backlog=1)
        self.events.append(event)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]
