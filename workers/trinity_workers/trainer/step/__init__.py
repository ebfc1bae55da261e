"""Training step: the division of a batch, and its losses and updates on each engine."""
