"""Entry point of ``python -m trinity_events``."""

from .cli import main

if __name__ == "__main__":
    main()
