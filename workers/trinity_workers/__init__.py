"""Training engines and their processes: trainers, explorers, and the demo that runs them all."""
