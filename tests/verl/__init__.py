"""Against veRL itself, where it is installed: ``make verl``."""
