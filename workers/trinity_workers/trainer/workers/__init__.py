"""Ranks of the trainer, as Ray actors, on each engine."""
