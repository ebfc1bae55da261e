"""Configuration of a run: its sections, their rules, and files and options that give values."""
