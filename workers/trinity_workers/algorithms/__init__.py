"""Algorithms as pure functions on one batch container: advantages, losses and corrections.

No engine owns them, and they import none. Their settings need no torch.
"""
