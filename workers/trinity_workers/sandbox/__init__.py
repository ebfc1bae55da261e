"""Processes that run code of users: rewards, environments and answers."""
