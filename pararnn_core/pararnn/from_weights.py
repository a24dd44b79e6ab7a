"""from_weights: a trained network's weights, in the layout of the library that trained it, as one of our cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pararnn.arrays import Array, Namespace, common_namespace
from pararnn.cells.mixing import MixingCell
from pararnn.cells.reset_first_gru import ResetFirstGRU
from pararnn.cells.stock import StockGRU, StockLSTM, StockRNN

# Recurrent rows per channel: what tells the kinds apart.
_KINDS: dict[int, type[MixingCell]] = {1: StockRNN, 3: StockGRU, 4: StockLSTM}


@dataclass(frozen=True)
class _Read:
    """What was found, rows by gate in our cell's order: W (G·D, I), R (G·D, D), biases (G·D,)."""

    kind: type[MixingCell]
    W: Array
    R: Array
    b: Array | None = None
    b_h: Array | None = None
    options: dict[str, Any] = field(default_factory=dict)


def from_weights(
    weights: Mapping[str, Any] | Sequence[Array],
    *,
    prefix: str = "",
    layer: int = 0,
    reverse: bool = False,
    nonlinearity: str = "tanh",
    reset_after: bool | None = None,
) -> MixingCell:
    """A StockGRU, StockLSTM, StockRNN or ResetFirstGRU with the given weights.

    ::

        sequential_apply(from_weights(w), x) = what the library that made w computes on x

    Kind, sizes and convention are read from names and shapes; what does not fit is refused. Taken are

    ========  ==============================================  ==========================================================
    PyTorch   ``state_dict()`` of nn.GRU, LSTM, RNN, their    ``weight_ih_l0``, … (rows r z n, or i f g o), or without
              cells                                           ``_l0``
    Flax      parameters of linen or nnx GRUCell, LSTMCell,   nested ``{"ir": {"kernel": …}, …}`` or ``{"dense_i": …}``;
              OptimizedLSTMCell, SimpleCell                   of nnx ``nnx.to_pure_dict(nnx.state(cell, nnx.Param))``
    Equinox   ``vars(cell)`` of eqx.nn.GRUCell, LSTMCell      ``weight_ih``, ``weight_hh``, ``bias``, ``bias_n``
    Keras 3   ``get_weights()`` of GRU, LSTM, SimpleRNN, or   kernel, recurrent_kernel, bias (columns z r h, or i f c o)
              a dict with these names
    ========  ==============================================  ==========================================================

    Activations are no part of the weights: the libraries' defaults are meant (σ and tanh). Arrays of the result are
    copies where a convention orders gates otherwise, else the given ones.

    Args:
        weights: arrays by name, nested or with names joined by ``.`` or ``/``, all of one library and dtype; for Keras
            also a list. Entries that are no arrays are passed over.
        prefix: take only what is below this name: ``"encoder.rnn"``, or ``"params"`` for linen's outermost level.
        layer, reverse: which of PyTorch's layers, and whether its reverse direction.
        nonlinearity: 'tanh' or 'relu', where the weights are an Elman network's.
        reset_after: Keras GRU without biases only, where shapes do not say it.

    Raises:
        TypeError: no mapping or list, arrays of several libraries or dtypes.
        ValueError: names or shapes that are none of the above; the message says what was found.

    >>> import numpy as np
    >>> from_weights({"weight_ih_l0": np.ones((12, 5)), "weight_hh_l0": np.ones((12, 4))})
    StockGRU(input_size=5, hidden_size=4, max_recurrent_norm=None, float64, numpy)
    """
    found = _named(weights, prefix)
    if not found:
        raise ValueError(f"from_weights: no arrays{f' below {prefix!r}' if prefix else ''}; wanted named weights")
    xp = common_namespace("from_weights", **found)
    dtypes = {str(a.dtype) for a in found.values()}
    if len(dtypes) > 1:
        raise TypeError(f"from_weights: arrays of one dtype are wanted, got {', '.join(sorted(dtypes))}")
    read = _reader(found)(xp, found, layer, reverse, reset_after)
    options = {**read.options, **({"nonlinearity": nonlinearity} if read.kind is StockRNN else {})}
    return _cell(xp, read, options)


def _named(weights: Any, prefix: str) -> dict[str, Array]:
    """All arrays by full name, levels joined by dots, below `prefix`."""
    if isinstance(weights, (list, tuple)):
        if len(weights) not in (2, 3):
            raise ValueError(
                f"from_weights: a list must be Keras's [kernel, recurrent_kernel, bias], got {len(weights)} entries"
            )
        weights = dict(zip(("kernel", "recurrent_kernel", "bias"), weights, strict=False))
    if not isinstance(weights, Mapping):
        raise TypeError(f"from_weights: wanted a dict of arrays or Keras's list, got {type(weights).__name__}")
    below = re.sub("/", ".", prefix).strip(".")
    cut = f"{below}." if below else ""
    return {name[len(cut) :]: a for name, a in _leaves(weights) if name.startswith(cut)}


def _leaves(weights: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in weights.items():
        name = f"{above}{str(key).replace('/', '.')}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        elif getattr(value, "ndim", 0):
            yield name, value


def _reader(found: dict[str, Array]) -> Callable[..., _Read]:
    """Who can read these names."""
    if any(name.startswith("weight_ih") for name in found):
        return _equinox if "bias" in found or "bias_n" in found else _torch
    if "recurrent_kernel" in found:
        return _keras
    if any(name.endswith(".kernel") for name in found):
        return _flax
    raise ValueError(
        f"from_weights: names {', '.join(sorted(found))} are none of PyTorch's, Flax's, Equinox's or Keras's; give "
        "the layer's own weights, with prefix= if they are part of a larger model"
    )


def _torch(xp: Namespace, found: dict[str, Array], layer: int, reverse: bool, reset_after: Any) -> _Read:
    end = "" if "weight_ih" in found else f"_l{layer}{'_reverse' if reverse else ''}"
    if f"weight_hr{end}" in found:
        raise ValueError(
            "from_weights: an LSTM with projections keeps less of its state than a cell needs; with u for o tanh(c), "
            "give weight_hh @ weight_hr as weight_hh without weight_hr, and take weight_hr @ u of the result"
        )
    every = {f"{name}{end}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    W, R = _need(found, f"weight_ih{end}", f"weight_hh{end}")
    _spare({n for n in found if not re.fullmatch(r"(weight|bias)_(ih|hh|hr)_l\d+(_reverse)?", n)} - every)
    return _Read(_kind(R), W, R, found.get(f"bias_ih{end}"), found.get(f"bias_hh{end}"))


def _equinox(xp: Namespace, found: dict[str, Array], layer: int, reverse: bool, reset_after: Any) -> _Read:
    W, R = _need(found, "weight_ih", "weight_hh")
    _spare(set(found) - {"weight_ih", "weight_hh", "bias", "bias_n"})
    kind, inner = _kind(R), found.get("bias_n")
    if inner is None:
        return _Read(kind, W, R, found.get("bias"))
    if kind is not StockGRU or tuple(inner.shape) != (int(R.shape[1]),):
        raise ValueError(
            f"from_weights: bias_n (D,) belongs to a GRU; got shape {tuple(inner.shape)} beside weight_hh "
            f"{tuple(R.shape)}"
        )
    return _Read(kind, W, R, found.get("bias"), xp.concat([xp.zeros_like(inner), xp.zeros_like(inner), inner]))


def _flax(xp: Namespace, found: dict[str, Array], layer: int, reverse: bool, reset_after: Any) -> _Read:
    """Kernels are (in, out); a gate each, or all side by side in our order."""
    names = {name.partition(".")[0].rstrip("_") for name in found}
    for gates, sides in (("rzn", "ih"), ("ifgo", "ih"), ("", ("dense_i", "dense_h")), ("", "ih")):
        if names == ({f"{side}{gate}" for side in sides for gate in gates} if gates else set(sides)):
            break
    else:
        raise ValueError(
            f"from_weights: {', '.join(sorted(names))} are not the parts of a Flax GRUCell (ir iz in hr hz hn), "
            "LSTMCell (ii if ig io hi hf hg ho), of their nnx forms (dense_i dense_h) or of SimpleCell (i h)"
        )
    flat = {re.sub(r"^(\w+?)_\.", r"\1.", name): a for name, a in found.items()}

    def side(part: str) -> tuple[Array, Array | None]:
        parts = [f"{part}{gate}" for gate in gates] or [part]
        kernels = [_need(flat, f"{p}.kernel")[0] for p in parts]
        biases = [flat.get(f"{p}.bias") for p in parts]
        width = int(kernels[0].shape[1])
        offsets = [xp.zeros_like(kernels[0][0, :]) if b is None else b for b in biases]
        bias = None if all(b is None for b in biases) else xp.concat(offsets)
        if bias is not None and tuple(bias.shape) != (width * len(parts),):
            raise ValueError(f"from_weights: the biases of {', '.join(parts)} have {bias.shape[0]} entries together")
        return xp.matrix_transpose(xp.concat(kernels, axis=1)), bias

    (W, b), (R, b_h) = side(sides[0]), side(sides[1])
    return _Read(_kind(R), W, R, b, b_h)


def _keras(xp: Namespace, found: dict[str, Array], layer: int, reverse: bool, reset_after: bool | None) -> _Read:
    kernel, recurrent = _need(found, "kernel", "recurrent_kernel")
    _spare(set(found) - {"kernel", "recurrent_kernel", "bias"})
    W, R, bias = xp.matrix_transpose(kernel), xp.matrix_transpose(recurrent), found.get("bias")
    kind = _kind(R)
    if kind is not StockGRU:
        return _Read(kind, W, R, bias)
    if bias is None and reset_after is None:
        raise ValueError("from_weights: a Keras GRU without bias does not show its reset_after; give reset_after=")
    after = bool(reset_after) if bias is None else bias.ndim == 2
    if bias is not None and reset_after is not None and bool(reset_after) != after:
        raise ValueError(
            f"from_weights: reset_after={reset_after} but the bias has shape {tuple(bias.shape)}; it is (2, 3·D) with "
            "reset_after and (3·D,) without"
        )
    width = int(R.shape[1])

    def ours(rows: Array) -> Array:
        """Rows z, r, h as r, z, n."""
        return xp.concat([rows[width : 2 * width, ...], rows[:width, ...], rows[2 * width :, ...]], axis=0)

    if bias is not None and int(bias.shape[-1]) != 3 * width:
        raise ValueError(f"from_weights: the bias must have 3·D = {3 * width} columns, got {tuple(bias.shape)}")
    W, R = ours(W), ours(R)
    if not after:
        return _Read(ResetFirstGRU, W, R, None if bias is None else ours(bias))
    if bias is None:
        return _Read(StockGRU, W, R)
    return _Read(StockGRU, W, R, ours(bias[0, :]), ours(bias[1, :]))


def _need(found: Mapping[str, Array], *names: str) -> list[Array]:
    """The matrices of these names, or a refusal."""
    for name in names:
        if name not in found:
            raise ValueError(f"from_weights: {name} is missing; there are {', '.join(sorted(found))}")
        if found[name].ndim != 2:
            raise ValueError(f"from_weights: {name} must be a matrix, got shape {tuple(found[name].shape)}")
    return [found[name] for name in names]


def _spare(names: set[str]) -> None:
    """Refuses arrays that nothing would be made of."""
    if names:
        raise ValueError(
            f"from_weights: {', '.join(sorted(names))} belong to no recurrent layer that is known here; choose the "
            "layer with prefix="
        )


def _kind(R: Array) -> type[MixingCell]:
    rows, width = (int(n) for n in R.shape)
    kind = _KINDS.get(rows // width if width and rows % width == 0 else 0)
    if kind is None:
        raise ValueError(
            f"from_weights: {rows} recurrent rows for {width} channels are none of 1 (RNN), 3 (GRU) or 4 (LSTM) each"
        )
    return kind


def _cell(xp: Namespace, read: _Read, options: dict[str, Any]) -> MixingCell:
    (rows, width), inputs = (int(n) for n in read.R.shape), int(read.W.shape[1])
    zero = xp.zeros_like(read.R[:, 0])
    arrays = {"W_x.weight": read.W, "W_x.bias": zero if read.b is None else read.b, "R": read.R}
    if read.kind.biases:
        arrays["b_h"] = zero if read.b_h is None else read.b_h
    elif read.b_h is not None:
        arrays["W_x.bias"] = arrays["W_x.bias"] + read.b_h
    wanted = {"W_x.weight": (rows, inputs), "W_x.bias": (rows,), "R": (rows, width), "b_h": (rows,)}
    for name, a in arrays.items():
        if tuple(a.shape) != wanted[name]:
            label = {"W_x.weight": "the input weights", "W_x.bias": "the bias", "b_h": "the recurrent bias"}[name]
            raise ValueError(
                f"from_weights: {label} must be {wanted[name]} to fit {rows} recurrent rows, got {tuple(a.shape)}"
            )
    small = read.kind(1, 1, seed=0, **options)
    cell = small._copy(None, arrays)
    cell._set(inputs, width, None, arrays)
    assert isinstance(cell, MixingCell)
    return cell
