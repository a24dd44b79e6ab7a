"""Where the generated kernels run in the tests: on a CUDA card, or on the CPU in Triton's interpreter."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="the kernels take torch tensors")
pytest.importorskip("triton", reason="triton is not installed")

ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"
if not ON_CARD and os.environ.get("TRITON_INTERPRET") != "1":
    # Triton reads the switch when it is first imported, so it cannot be thrown here.
    pytest.skip(
        "no CUDA card; .ci/run runs the kernels' tests by themselves with TRITON_INTERPRET=1", allow_module_level=True
    )
