"""Record of rollouts: files next to the log with the samples that were trained on."""
