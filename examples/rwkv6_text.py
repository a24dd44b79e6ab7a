"""A small RWKV-6 language model in plain JAX: trained on real text, its recurrence swapped for another form half-way.

    python examples/rwkv6_text.py [--steps 300] [--text FILE]

Without --text it learns the reference texts that Python carries for its own help(). No kernels, no CUDA, no Triton: the
recurrence is pararnn.linear_attention.rwkv6, a function of arrays that jax.jit and jax.grad look into.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pararnn.linear_attention import rwkv6

HEADS, WIDTH, DEPTH, RANK, TIME, BATCH = 4, 96, 2, 16, 128, 8


def text_of(path: str | None) -> np.ndarray:
    """The bytes to learn."""
    if path is not None:
        return np.frombuffer(Path(path).read_bytes(), dtype=np.uint8)
    from pydoc_data.topics import topics

    return np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), dtype=np.uint8)


def start(seed: int) -> dict[str, Any]:
    """Parameters of the model."""
    rng = np.random.default_rng(seed)

    def dense(*shape: int, size: float = 1.0) -> jax.Array:
        return jnp.asarray(size * rng.standard_normal(shape) / np.sqrt(shape[0]), dtype=jnp.float32)

    # Decays from slow to fast over the channels of a head, as a fresh model has them.
    slow_to_fast = np.tile(np.linspace(-6.0, 0.0, WIDTH // HEADS), HEADS)
    blocks = [
        {
            "norm1": jnp.ones(WIDTH),
            "norm2": jnp.ones(WIDTH),
            "mix": jnp.full((6, WIDTH), 0.5),
            "r": dense(WIDTH, WIDTH),
            "k": dense(WIDTH, WIDTH),
            "v": dense(WIDTH, WIDTH),
            "gate": dense(WIDTH, WIDTH),
            "out": dense(WIDTH, WIDTH, size=0.5),
            "decay": jnp.asarray(slow_to_fast, dtype=jnp.float32),
            "decay_in": dense(WIDTH, RANK),
            "decay_out": dense(RANK, WIDTH, size=0.1),
            "bonus": jnp.full((HEADS, WIDTH // HEADS), 0.5),
            "group_scale": jnp.ones((HEADS, WIDTH // HEADS)),
            "group_shift": jnp.zeros((HEADS, WIDTH // HEADS)),
            "up": dense(WIDTH, 3 * WIDTH),
            "down": dense(3 * WIDTH, WIDTH, size=0.5),
        }
        for _ in range(DEPTH)
    ]
    return {"embed": dense(256, WIDTH, size=4.0), "blocks": blocks, "norm": jnp.ones(WIDTH), "head": dense(WIDTH, 256)}


def normed(x: jax.Array, scale: jax.Array, shift: jax.Array | float = 0.0) -> jax.Array:
    """Mean 0 and variance 1 over the last axis."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + shift


def time_mix(p: dict[str, Any], x: jax.Array, form: str) -> jax.Array:
    """The recurrent half of a block: token shift, data-dependent decay, rwkv6, group norm by head, gate."""
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    r, k, v, w, g = (x + (before - x) * p["mix"][i] for i in range(5))
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    log_decay = -jnp.exp(p["decay"] + jnp.tanh(w @ p["decay_in"]) @ p["decay_out"])
    r, k, v, log_decay = (a.reshape(heads) for a in (r @ p["r"], k @ p["k"], v @ p["v"], log_decay))
    out, _ = rwkv6(r, k, v, log_decay, p["bonus"], form=form, chunk=32)
    out = normed(out, p["group_scale"], p["group_shift"]).reshape(x.shape)
    return (out * jax.nn.silu(g @ p["gate"])) @ p["out"]


def channel_mix(p: dict[str, Any], x: jax.Array) -> jax.Array:
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return jnp.square(jax.nn.relu((x + (before - x) * p["mix"][5]) @ p["up"])) @ p["down"]


def loss_of(params: dict[str, Any], tokens: jax.Array, form: str) -> jax.Array:
    """Nats a byte, of (B, T + 1) bytes."""
    x = params["embed"][tokens[:, :-1]]
    for p in params["blocks"]:
        x = x + time_mix(p, normed(x, p["norm1"]), form)
        x = x + channel_mix(p, normed(x, p["norm2"]))
    scores = jax.nn.log_softmax(normed(x, params["norm"]) @ params["head"])
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()


@partial(jax.jit, static_argnames="form")
def train_step(params: Any, moments: Any, step: jax.Array, tokens: jax.Array, form: str) -> tuple[Any, Any, jax.Array]:
    """One step of Adam."""
    loss, grads = jax.value_and_grad(loss_of)(params, tokens, form)
    tree = jax.tree.map
    first = tree(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = tree(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], grads)
    rate = 3e-3 * jnp.sqrt(1 - 0.99**step) / (1 - 0.9**step) * jnp.minimum(1.0, step / 20)
    params = tree(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, first, second)
    return params, (first, second), loss


def train(steps: int, text: np.ndarray, *, seed: int = 0, say: Any = print) -> list[float]:
    """The losses of all steps; the form changes half-way, and the loss of one batch is computed in both."""
    rng = np.random.default_rng(seed)
    params = start(seed)
    zeros = jax.tree.map(jnp.zeros_like, params)
    moments, losses, form = (zeros, zeros), [], "chunk"
    began = time.perf_counter()
    for step in range(1, steps + 1):
        at = rng.integers(0, len(text) - TIME - 1, size=(BATCH, 1)) + np.arange(TIME + 1)
        tokens = jnp.asarray(text[at], dtype=jnp.int32)
        if step == steps // 2 + 1:
            old, form = form, "subchunk"
            both = [float(loss_of(params, tokens, f)) for f in (old, form)]
            say(f"step {step}: from {old} to {form}, loss of one batch {both[0]:.6f} and {both[1]:.6f}")
        params, moments, loss = train_step(params, moments, jnp.asarray(float(step)), tokens, form)
        losses.append(float(loss))
        if step % max(1, steps // 10) == 0:
            say(f"step {step}: loss {np.mean(losses[-20:]):.3f} nats a byte, {time.perf_counter() - began:.0f} s")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", help="a file to learn instead")
    given = parser.parse_args()
    train(given.steps, text_of(given.text))
