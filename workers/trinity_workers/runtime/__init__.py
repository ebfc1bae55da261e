"""Processes of a run: tasks in the background, exits, health, network and collectives."""
