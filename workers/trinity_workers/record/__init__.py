"""Recorder of rollouts in a trainer's rank, and the process that writes its files."""
