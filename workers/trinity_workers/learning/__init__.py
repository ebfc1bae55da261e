"""The small language model that really learns: tasks, policy, warm-up, rollouts, GRPO loss."""
