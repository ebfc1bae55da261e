"""The small language model that really learns: its tasks, its policy, its warm-up, its rollouts and its GRPO loss."""
