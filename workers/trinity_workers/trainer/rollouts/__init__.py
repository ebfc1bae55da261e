"""Supply of rollouts to the trainer, and evaluations."""
