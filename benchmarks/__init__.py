"""Benchmarks of the event and weight planes; each figure has a limit or peer of the same run.

``python -m benchmarks`` lists them; ``make bench`` runs them all.
"""
