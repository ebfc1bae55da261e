"""Decisions of the reducer on the state: files, deadlines, retention and reports. Pure."""
