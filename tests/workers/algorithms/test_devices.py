"""Everything is computed on the device of the batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.batches import make_batch, near  # noqa: E402
from tests.support.gpu import GPU  # noqa: E402
from trinity_workers.algorithms.distillation import token_divergence  # noqa: E402
from trinity_workers.algorithms.logits import token_statistics  # noqa: E402
from trinity_workers.algorithms.prepare import prepare  # noqa: E402
from trinity_workers.algorithms.presets import PRESETS  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.algorithms.update import policy_update, value_update  # noqa: E402

CORRECTED = {
    "importance_sampling": {"ratio_to": "proximal", "weights": "sequence", "mask": "geometric"},
    "kl": {"coefficient": 0.1},
    "entropy_coefficient": 0.1,
    "filters": {"zero_variance": "mask"},
    "overlong": {"mask": True, "buffer": 0.5},
}
SETTINGS = {
    **{name: {"preset": name} for name in PRESETS},
    "corrected": CORRECTED,
    "batch": {"scale": "batch", "deviation": "sample"},
}


def computed(batch, settings):
    """Prepare a padded batch, and take the losses of policy and critic, forth and back."""
    config = read_settings(settings).with_limit(6)
    prepared, means = prepare(batch.padded(4), config)
    logits = (
        torch.randn(
            len(prepared),
            prepared.response_width,
            11,
            generator=torch.Generator().manual_seed(0),
            device="cpu",
        )
        .to(prepared.input_ids.device)
        .requires_grad_()
    )
    tokens = prepared.responses % 11
    current = token_statistics(logits, tokens, entropy=True, chunk=7)
    divergence = token_divergence(logits, logits.detach() * 2, "jensen-shannon", chunk=7)
    update = policy_update(
        prepared, current.logprobs, config, entropy=current.entropy, divergence=divergence
    )
    loss = update.loss(update.denominator, ranks=2)
    metrics = means + update.metrics
    if config.critic.use:
        valued = value_update(prepared, current.logprobs, config)
        loss, metrics = loss + valued.loss(valued.denominator), metrics + valued.metrics
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss, gradient, metrics


@pytest.mark.parametrize("name", SETTINGS)
def test_no_tensor_is_made_on_the_default_device(name):
    """The default is another one here, and tensors of two devices cannot be mixed."""
    batch = make_batch([3, 1, 4, 2, 2], groups=[0, 0, 1, 1, 1], token_rewards=None)
    expected = computed(batch, SETTINGS[name])
    with torch.device("meta"):
        result = computed(batch, SETTINGS[name])
    near(result[0], expected[0])
    near(result[1], expected[1])
    assert result[2].values() == expected[2].values()


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_gpu_computes_what_the_cpu_does(name, device):
    batch = make_batch([3, 1, 4, 2, 2], groups=[0, 0, 1, 1, 1], token_rewards=None)
    loss, gradient, metrics = computed(batch, SETTINGS[name])
    there = computed(batch.to(device), SETTINGS[name])
    assert there[1].device.type == device
    near(there[0].cpu(), loss, 1e-5)
    near(there[1].cpu(), gradient, 1e-5)
    assert there[2].values() == pytest.approx(metrics.values(), abs=1e-5)
