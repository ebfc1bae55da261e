"""Queries over the state and events of a run, for people and commands. Pure, like the core."""
