"""Conversion between formats of models and checkpoints."""
