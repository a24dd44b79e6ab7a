"""The RWKV-6 example learns real text, and its recurrence changes form half-way without a jump (P60, P61)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="the example is written in JAX")


@pytest.mark.slow
def test_loss_falls_and_forms_are_interchangeable(monkeypatch):
    path = Path(__file__).parent.parent / "examples" / "rwkv6_text.py"
    spec = importlib.util.spec_from_file_location("rwkv6_text", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for name, value in {"DEPTH": 1, "TIME": 32, "WIDTH": 32, "HEADS": 2}.items():
        monkeypatch.setattr(example, name, value)
    said = []
    losses = example.train(60, example.text_of(None), say=said.append)
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    (switch,) = (line for line in said if "subchunk" in line)
    before, after = switch.rpartition("batch ")[2].split(" and ")
    assert float(before) == pytest.approx(float(after), rel=1e-5)
