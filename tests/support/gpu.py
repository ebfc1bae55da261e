"""Parameters of tests that need a GPU."""

import pytest
import torch

GPU = pytest.param(
    "cuda",
    marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="this machine has no GPU, or torch is built without"
    ),
)
