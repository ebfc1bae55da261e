"""Hosts that are apart, made from namespaces of one machine, and faults of their links."""
