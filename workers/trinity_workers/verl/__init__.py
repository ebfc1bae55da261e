"""Weights to and from veRL: a backend of its checkpoint engine, over this project's transports.

veRL imports :mod:`trinity_workers.verl.backend` when its configuration names that; nothing else
here imports veRL.
"""
