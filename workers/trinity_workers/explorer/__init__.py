"""Explorer: answers rollout requests with fresh weights."""
