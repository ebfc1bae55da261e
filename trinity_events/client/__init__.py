"""Library for users: publishing a run's events, and waiting for its ready steps."""
