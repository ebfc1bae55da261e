"""Models of a trainer's rank on each engine: policy, critic, reference and others."""
