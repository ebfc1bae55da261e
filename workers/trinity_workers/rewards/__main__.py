"""Entry of a reward process: `python -m trinity_workers.rewards`."""

from .child import main

if __name__ == "__main__":  # multiprocessing imports this module in processes that it spawns
    main()
