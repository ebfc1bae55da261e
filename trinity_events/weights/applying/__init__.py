"""Application of a version to a model, or to tensors that a caller gives."""
