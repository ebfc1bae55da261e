"""What changed between two versions, and the versions made of it."""
