"""The ways that a version's parts travel, behind one port."""
