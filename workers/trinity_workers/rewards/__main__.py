"""Entry of a reward process: `python -m trinity_workers.rewards`."""

from .child import main

main()
