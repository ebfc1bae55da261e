"""Event log on Redis streams, and all that knows Redis's commands and replies."""
