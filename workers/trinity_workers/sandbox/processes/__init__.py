"""Processes that run a user's code: frames over pipes, and a pool that replaces failed ones."""
