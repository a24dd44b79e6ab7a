"""JAX on eight virtual devices: time, batch and channels sharded, forward and gradient equal to one device's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")


def test_eight_devices_give_what_one_gives():
    """States and gradients over time, a chaotic cell, memory per device, NamedSharding, and what is refused."""
    script = Path(__file__).with_name("jax_eight_devices.py")
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for shown in ("refusals", "over time: ParaGRU 5", "over time: ParaLSTM", "chaos", "memory", "batch and channels"):
        assert shown in done.stdout, done.stdout
