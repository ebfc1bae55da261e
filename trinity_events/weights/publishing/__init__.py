"""Publishing of a version: from a rank's tensors to sealed parts."""
