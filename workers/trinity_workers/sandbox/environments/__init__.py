"""Environments of episodes with several turns, such as tools, in processes that may die."""

from .processes import EnvironmentFailed, EnvironmentProcesses

__all__ = ["EnvironmentFailed", "EnvironmentProcesses"]
