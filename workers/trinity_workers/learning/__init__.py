"""The small language model that really learns: policy, warm-up, rollouts, GRPO loss."""
