"""Folder of a checkpoint: names of its files, its manifest, and the comparison of both."""
