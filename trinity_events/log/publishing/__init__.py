"""Publishers: events on their way into a log."""
