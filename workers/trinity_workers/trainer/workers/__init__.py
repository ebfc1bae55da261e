"""Ranks of the trainer, as Ray actors, on each engine."""

ROLE = "actor"
"""Role of the trainer's ranks in events."""
