"""Web dashboard: pages over the fold of a run's log, which they only read."""
