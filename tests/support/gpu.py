"""Mark and parameter of tests that need a GPU."""

import pytest
import torch

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no GPU, or torch is built without"
)
GPU = pytest.param("cuda", marks=needs_gpu)
