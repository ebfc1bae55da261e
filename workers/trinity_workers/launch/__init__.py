"""Starts every part of a run on this machine (the demo), or one of them beside the others."""
