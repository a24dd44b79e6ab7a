"""The byte model: an embedding table, a recurrent cell, a linear readout; its loss and gradient in plain NumPy."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from pararnn.cells import (
    ChannelwiseCell,
    ParaCfC,
    ParaGRU,
    ParaHopfield,
    ParaLEM,
    ParaLRU,
    ParaLSTM,
    ParaMinGRU,
    ParaMinLSTM,
    ParaNLRU,
    ParaS5,
    ParaSLSTM,
    ParaTanh,
    ParaTitans,
    ParaUnICORNN,
    ResetFirstGRU,
    StockCfC,
    StockGRU,
    StockLSTM,
    StockRNN,
)
from pararnn.config import NewtonConfig
from pararnn.demo.text import SYMBOLS
from pararnn.newton import newton_apply, newton_vjp
from pararnn.stats import NewtonStats

# Every cell that is made of two sizes and whose state is a row of channels, which the readout can take.
CELLS: dict[str, type[ChannelwiseCell]] = {
    "gru": ParaGRU,
    "lstm": ParaLSTM,
    "slstm": ParaSLSTM,
    "tanh": ParaTanh,
    "nlru": ParaNLRU,
    "cfc": ParaCfC,
    "titans": ParaTitans,
    "lem": ParaLEM,
    "unicornn": ParaUnICORNN,
    "mingru": ParaMinGRU,
    "minlstm": ParaMinLSTM,
    "lru": ParaLRU,
    "s5": ParaS5,
    "hopfield": ParaHopfield,
    "stock-gru": StockGRU,
    "stock-lstm": StockLSTM,
    "stock-rnn": StockRNN,
    "stock-cfc": StockCfC,
    "reset-first-gru": ResetFirstGRU,
}

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class ByteModel:
    """Predicts each byte from all before it.

    ::

        x_t = E[byte_t]    h_t = cell(h_{t-1}, x_t)    p(byte_{t+1}) = softmax(W h_t + b)
    """

    kind: str
    cell: ChannelwiseCell
    embedding: np.ndarray
    weight: np.ndarray
    bias: np.ndarray

    @classmethod
    def fresh(cls, kind: str, *, features: int, width: int, seed: int, dtype: Any = np.float32) -> ByteModel:
        rng = np.random.default_rng(seed)
        cell = CELLS[kind](features, width, dtype=dtype, seed=seed)
        embedding = rng.standard_normal((SYMBOLS, features)).astype(dtype)
        # Small, so that an untrained model holds all bytes for about equally likely: 8 bits.
        weight = (0.1 * rng.standard_normal((SYMBOLS, width)) / math.sqrt(width)).astype(dtype)
        return cls(kind, cell, embedding, weight, np.zeros(SYMBOLS, dtype=dtype))

    @property
    def arrays(self) -> Arrays:
        """Every trained array by name."""
        own = {"embedding": self.embedding, "readout.weight": self.weight, "readout.bias": self.bias}
        return own | {f"cell.{name}": array for name, array in self.cell.arrays.items()}

    def replace(self, arrays: Arrays) -> ByteModel:
        """The same model with other numbers in all of its arrays."""
        cell = self.cell.replace(**{name: arrays[f"cell.{name}"] for name in self.cell.arrays})
        return ByteModel(self.kind, cell, arrays["embedding"], arrays["readout.weight"], arrays["readout.bias"])

    def embed(self, symbols: np.ndarray) -> np.ndarray:
        """(B, T) bytes to (B, T, I)."""
        return self.embedding[symbols]

    def hidden(self, states: np.ndarray) -> np.ndarray:
        """The slot that the readout sees, (B, T, D)."""
        return states if self.cell.state_slots == 1 else states[:, :, self.cell.hidden_slot]

    def logits(self, states: np.ndarray) -> np.ndarray:
        return self.hidden(states) @ self.weight.T + self.bias

    def bits(self, states: np.ndarray, targets: np.ndarray) -> float:
        """Mean bits per byte of `targets` (B, T) given the states before them."""
        # In blocks, because the probabilities of a long text would be far larger than its states.
        total, block = 0.0, 8192
        for begin in range(0, targets.shape[1], block):
            part = slice(begin, begin + block)
            losses, _ = cross_entropy(self.logits(states[:, part]), targets[:, part])
            total += float(np.sum(losses, dtype=np.float64))
        return total / targets.size / math.log(2.0)

    def evaluate(self, pieces: np.ndarray, config: NewtonConfig | None = None) -> float:
        """Bits per byte on pieces of text (B, T+1), each read from a fresh state."""
        states = newton_apply(self.cell, self.embed(pieces[:, :-1]), config)
        return self.bits(states, pieces[:, 1:])

    def loss_and_gradient(
        self, window: np.ndarray, config: NewtonConfig | None = None, stats: NewtonStats | None = None
    ) -> tuple[float, Arrays]:
        """Bits per byte on `window` (B, T+1), and the gradient of the mean loss in nats by array name."""
        inputs, targets = window[:, :-1], window[:, 1:]
        states, pullback = newton_vjp(self.cell, self.embed(inputs), config, stats=stats)
        hidden = self.hidden(states)
        losses, d_logits = cross_entropy(self.logits(states), targets)
        d_logits /= targets.size
        rows = d_logits.reshape(-1, SYMBOLS)
        d_hidden = d_logits @ self.weight
        if self.cell.state_slots > 1:
            d_states = np.zeros_like(states)
            d_states[:, :, self.cell.hidden_slot] = d_hidden
        else:
            d_states = d_hidden
        inner = pullback(d_states)
        gradient = {
            "embedding": sum_by_symbol(inputs, inner.x),
            "readout.weight": rows.T @ hidden.reshape(-1, hidden.shape[-1]),
            "readout.bias": np.sum(rows, axis=0),
        }
        gradient |= {f"cell.{name}": value for name, value in inner.params.items()}
        return float(np.mean(losses, dtype=np.float64)) / math.log(2.0), gradient

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the arrays and what is needed to build the model again."""
        cap = self.cell.max_recurrent_norm
        np.savez(
            path, allow_pickle=False, kind=np.array(self.kind),
            max_recurrent_norm=np.array(math.inf if cap is None else cap), **self.arrays,
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ByteModel:
        """A model that :meth:`save` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        kind, cap = str(arrays.pop("kind")), float(arrays.pop("max_recurrent_norm"))
        features, width = arrays["embedding"].shape[1], arrays["readout.weight"].shape[1]
        model = cls.fresh(kind, features=features, width=width, seed=0, dtype=arrays["embedding"].dtype)
        model = model.replace(arrays)
        cell = model.cell.replace(max_recurrent_norm=None if math.isinf(cap) else cap)
        return cls(kind, cell, model.embedding, model.weight, model.bias)


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-log softmax(logits)[target] of each row, in nats, and its derivative by the logits.

    Overwrites `logits`, the largest array of a training step, with the derivative.
    """
    logits -= np.max(logits, axis=-1, keepdims=True)
    at = targets[..., None].astype(np.intp)
    chosen = np.take_along_axis(logits, at, axis=-1)[..., 0]
    share = np.exp(logits, out=logits)
    total = np.sum(share, axis=-1, keepdims=True)
    losses = np.log(total[..., 0]) - chosen
    share /= total
    np.put_along_axis(share, at, np.take_along_axis(share, at, axis=-1) - 1.0, axis=-1)
    return losses, share


def sum_by_symbol(symbols: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(SYMBOLS, I): for each byte the sum of its rows, which is the adjoint of looking rows up."""
    flat = symbols.reshape(-1)
    order = np.argsort(flat, kind="stable")
    present, first = np.unique(flat[order], return_index=True)
    out = np.zeros((SYMBOLS, rows.shape[-1]), dtype=rows.dtype)
    out[present] = np.add.reduceat(rows.reshape(-1, rows.shape[-1])[order], first, axis=0)
    return out
