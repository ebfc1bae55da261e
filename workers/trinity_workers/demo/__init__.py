"""The main job, with every part a process of its own on this machine."""
