"""Sections of a configuration: data, with the meaning of each field. None knows another."""
