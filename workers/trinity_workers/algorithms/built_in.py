"""Names of the built-in advantages and losses, and where they are defined; without torch."""

from __future__ import annotations

_HERE = "trinity_workers.algorithms"
ADVANTAGES = {
    "grpo": f"{_HERE}.advantages.groups:grpo",
    "rloo": f"{_HERE}.advantages.groups:rloo",
    "reinforce++": f"{_HERE}.advantages.returns:reinforce_plus_plus",
    "reinforce++-baseline": f"{_HERE}.advantages.groups:reinforce_plus_plus_baseline",
    "gae": f"{_HERE}.advantages.returns:gae",
    "teacher": f"{_HERE}.advantages.from_teacher:teacher",
    "none": f"{_HERE}.advantages.from_teacher:none",
}
"""Built-in advantages."""
POLICY_LOSSES = {
    "ppo": f"{_HERE}.policy_losses.clipped:ppo",
    "gspo": f"{_HERE}.policy_losses.clipped:gspo",
    "cispo": f"{_HERE}.policy_losses.clipped:cispo",
    "reinforce": f"{_HERE}.policy_losses.without_ratio:reinforce",
    "supervised": f"{_HERE}.policy_losses.without_ratio:supervised",
    "divergence": f"{_HERE}.policy_losses.without_ratio:divergence",
}
"""Built-in losses of the policy."""
