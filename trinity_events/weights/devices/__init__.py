"""Copies from and to a GPU, on streams of their own."""
