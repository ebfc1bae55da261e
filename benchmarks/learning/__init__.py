"""Learning: held-out reward over time, through the pipeline and in one process without it."""
