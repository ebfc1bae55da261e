"""Weights to and from veRL: a backend of its checkpoint engine, over this project's transports.

veRL imports :mod:`trinity_workers.verl.backend` if its configuration names that module. No other
module here imports veRL.
"""
