"""Evaluation while training: sets of held-out questions, when each is due, and its results."""
