"""The engines and those who drive them: trainers, explorers, and the demo that runs them all."""
