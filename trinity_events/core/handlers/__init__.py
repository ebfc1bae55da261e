"""Handlers of the fold: each changes the state by the events of one part of a run."""
