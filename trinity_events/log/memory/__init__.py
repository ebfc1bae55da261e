"""Event log in memory, for tests and simulations."""
