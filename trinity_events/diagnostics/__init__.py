"""Waits and stacks of this process, for a run that does not move."""
