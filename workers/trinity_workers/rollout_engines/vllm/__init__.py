"""Rollout engine of vLLM, in vLLM's own processes: an engine here, and a plugin there."""
