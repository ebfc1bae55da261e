"""Deltas between versions, and the versions reconstructed from them."""
