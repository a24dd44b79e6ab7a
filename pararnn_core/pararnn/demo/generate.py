"""Text made up by the model, one byte after the other."""

from __future__ import annotations

import numpy as np

from pararnn.demo.model import ByteModel
from pararnn.sequential import sequential_apply


def generate(model: ByteModel, count: int, *, prompt: bytes = b"\n", temperature: float = 0.7, seed: int = 0) -> bytes:
    """`count` bytes that follow `prompt`; each is drawn, so there is nothing to run in parallel."""
    rng = np.random.default_rng(seed)
    made, state, given = bytearray(), None, np.frombuffer(prompt, dtype=np.uint8)
    for _ in range(count):
        states = sequential_apply(model.cell, model.embed(given[None, :]), h0=state)
        state = states[:, -1]
        logits = model.logits(states[:, -1:])[0, 0].astype(np.float64) / temperature
        share = np.exp(logits - logits.max())
        given = rng.choice(share.size, size=1, p=share / share.sum()).astype(np.uint8)
        made += given.tobytes()
    return bytes(made)


def readable(text: bytes) -> str:
    """Bytes as text that a terminal may safely be given."""
    shown = text.decode("utf-8", errors="replace")
    shown = shown.expandtabs(4)
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in shown)
