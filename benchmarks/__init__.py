"""What the event plane costs, each figure beside a limit or a peer measured in the same run.

``python -m benchmarks`` lists them; ``make bench`` runs them all.
"""
