"""Engines of veRL as they are, behind the interfaces of this project's engines."""
