"""One step at a time: decoding after a prefill, from a state that the caller keeps, or a pool of states in place."""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np

from pararnn.arrays import FLOATS, Array, Namespace, cast, compute_dtype, dtype_name, is_array, namespace_name, quiet
from pararnn.cells.base import ChannelwiseCell
from pararnn.cells.mixing import MixingCell
from pararnn.drives import with_drives
from pararnn.front import adopted, front_of
from pararnn.problem import check_input
from pararnn.registry import decoder_of


def decode_wx(cell: Any, x: Array, *, out: Array | None = None) -> Array:
    """The input projection of one step, to be given to decode_step.

    ::

        out = x W_xᵀ + b

    Args:
        cell: a cell, its arrays of the same library and dtype as `x`.
        x: (B, I), or (B, 1, I).
        out: (B, rows of W_x) of the dtype of the computation, to be written instead of a new array.

    Returns:
        (B, rows of W_x) or (B, 1, rows), in float32 for half precision, else in x's dtype.

    Raises:
        TypeError, ValueError: input that does not fit; an `out` that cannot be written in place.

    >>> import numpy as np
    >>> from pararnn import ParaGRU
    >>> decode_wx(ParaGRU(3, 4, seed=0), np.zeros((2, 3), dtype=np.float32)).shape
    (2, 12)
    """
    x, rank = _one_step("decode_wx", cell, x)
    xp = check_input("decode_wx", cell, x)
    work = compute_dtype(xp, x.dtype)
    batch, rows = int(x.shape[0]), int(cell.W_x.weight.shape[0])
    shape = (batch, rows) if rank == 2 else (batch, 1, rows)
    if out is not None:
        _check_out("decode_wx", xp, out, shape, work, x)
    weight, bias = (cast(xp, a, work) for a in cell.W_x)
    row = cast(xp, x[:, 0, :], work)
    if out is not None and namespace_name(xp) == "torch":
        import torch

        # addmm reads its rows while it writes: an `out` that shares x's memory needs the product elsewhere first.
        if torch.compiler.is_compiling() or row.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
            torch.addmm(bias, row, weight.T, out=out.view(batch, rows))
            return out
    made = xp.reshape(row @ xp.matrix_transpose(weight) + bias, shape)
    if out is None:
        return made
    out[...] = made
    return out


def decode_step(
    cell: Any,
    state: Array,
    x: Array | None = None,
    *,
    wx: Array | None = None,
    out: Array | None = None,
    block_table: Array | None = None,
    **drives: Any,
) -> Array:
    """The state after one more step.

    ::

        h' = f(h, W_x x + b)

    Equal to newton_apply and sequential_apply with T = 1; a sequence decoded step by step is the sequence run at once.
    On CUDA tensors one kernel does the step; with `out` (or `block_table`) and `wx` it allocates nothing, so that it
    can be captured in a CUDA graph.

    Args:
        cell: a cell, its arrays of the same library and dtype as `x`.
        state: (B, D), or (B, S, D) for S slots, in the cell's dtype or in float32, which keeps small changes that half
            precision would lose. With `block_table` a pool (C, …) of such states.
        x: (B, I), or (B, 1, I); the result has the same rank. wx: instead of `x`, what decode_wx made of it.
        out: like the result, in the state's dtype; written and returned. It may be `state` itself.
        block_table: (B,) integers; row b reads its state from ``state[block_table[b]]`` and writes it back there. A
            negative number marks a row without a request: it starts from zeros and writes nothing back. No two rows
            may name the same state (checked on the CPU; on a device that would mean to wait for it).
        drives: per-step inputs of cells that have them, as to newton_apply.

    Returns:
        (B, …) or (B, 1, …), in the state's dtype. On tensors that autograd watches it is differentiable.

    Raises:
        TypeError, ValueError: neither or both of x and wx; shapes, dtypes, or indices that do not fit.
        RuntimeError: `block_table` or `out` on tensors that autograd watches.

    >>> import numpy as np
    >>> from pararnn import ParaGRU, sequential_apply
    >>> cell, x = ParaGRU(3, 4, seed=0), np.ones((1, 5, 3), dtype=np.float32)
    >>> state = np.zeros((1, 4), dtype=np.float32)
    >>> for t in range(5):
    ...     state = decode_step(cell, state, x[:, t])
    >>> bool(np.abs(state - sequential_apply(cell, x)[:, -1]).max() < 1e-6)
    True
    """
    if (x is None) == (wx is None):
        raise ValueError("decode_step: give x, or wx (what decode_wx made of it), and not both")
    given = x if wx is None else wx
    given, rank = _one_step("decode_step", cell, given)
    if wx is None:
        cell, given = with_drives("decode_step", cell, given, drives)
    elif drives:
        raise TypeError(f"decode_step: {', '.join(drives)} belongs to x, which wx stands for; give x")
    xp, state = _checked_input(cell, given, state, wx is not None)
    batch, shape = int(given.shape[0]), tuple(cell.state_shape)
    table = None
    if block_table is None:
        if tuple(state.shape) != (batch, *shape):
            raise ValueError(f"decode_step: state must have shape {(batch, *shape)}, got {tuple(state.shape)}")
    else:
        if tuple(state.shape[1:]) != shape or state.ndim != len(shape) + 1:
            raise ValueError(f"decode_step: a pool of states must be (C, …) with … = {shape}, got {tuple(state.shape)}")
        table = _checked_table(xp, block_table, batch, state)
    wanted = (batch, *shape) if rank == 2 else (batch, 1, *shape)
    if out is not None:
        _check_out("decode_step", xp, out, wanted, state.dtype, state)
    front = front_of(given)
    watched = front is not None and front.watches(given, state, *cell.arrays.values())
    if watched and (out is not None or table is not None):
        raise RuntimeError(
            "decode_step: out and block_table write in place, which autograd cannot follow; use torch.no_grad(), or "
            "leave them out"
        )
    decoder = None if watched else decoder_of(cell, state)
    if decoder is not None:
        made = decoder.decode(cell, state, given[:, 0, :], wx is not None, out, table)
        return made if tuple(made.shape) == wanted else xp.reshape(made, wanted)
    if watched:
        assert front is not None
        xp = front.smooth(xp)
    rows = state if table is None else _rows_at(xp, state, table)
    with quiet(xp):
        new = _step(xp, cell, rows, given, wx is not None)
    new = cast(xp, new, state.dtype)
    if table is not None:
        _put_rows(state, table, new)
    new = xp.reshape(new, wanted)
    if out is None:
        return new
    out[...] = new
    return out


def can_decode_step(cell: Any, ref: Array) -> bool:
    """Whether decode_step runs `cell` as one compiled kernel on arrays like `ref`; it works either way.

    Raises:
        TypeError: `cell` is no cell, or `ref` no array.

    >>> import numpy as np
    >>> from pararnn import ParaGRU
    >>> can_decode_step(ParaGRU(3, 4), np.zeros((1, 4), dtype=np.float32))
    False
    """
    if not isinstance(cell, ChannelwiseCell):
        raise TypeError(f"can_decode_step: cell must be a cell (ParaGRU, …), got {type(cell).__name__}")
    if not is_array(ref):
        raise TypeError(f"can_decode_step: ref must be an array, got {type(ref).__name__}")
    return decoder_of(cell, ref) is not None


def _one_step(what: str, cell: Any, x: Any) -> tuple[Array, int]:
    """The input as (B, 1, F), and its rank."""
    if not isinstance(cell, ChannelwiseCell):
        raise TypeError(f"{what}: cell must be a cell (ParaGRU, …), got {type(cell).__name__}")
    x = adopted(x)
    if not is_array(x):
        raise TypeError(f"{what}: the input must be an array, got {type(x).__name__}")
    if x.ndim == 2:
        return x[:, None, :], 2
    if x.ndim == 3 and int(x.shape[1]) == 1:
        return x, 3
    raise ValueError(
        f"{what}: the input of one step must be (B, F) or (B, 1, F), got {tuple(x.shape)}; newton_apply takes sequences"
    )


def _checked_input(cell: Any, given: Array, state: Any, projected: bool) -> tuple[Namespace, Array]:
    """The namespace, and the state as an array; a refusal where the input or the state's kind does not fit."""
    state = adopted(state)
    if not is_array(state):
        raise TypeError(f"decode_step: state must be an array, got {type(state).__name__}; zeros start a sequence")
    if not projected:
        xp = check_input("decode_step", cell, given, state=state)
        if not cell.is_driven:
            raise TypeError(f"decode_step: {type(cell).__name__} needs its per-step input {', '.join(cell.drives)}")
    else:
        # Checked as an input of as many features as the cell has gate inputs.
        rows = int(cell.W_x.weight.shape[0])
        xp = array_api_compat.array_namespace(given, state, cell.W_x.weight)
        if int(given.shape[2]) != rows:
            raise ValueError(f"decode_step: wx must have {rows} columns, got {int(given.shape[2])}")
        if dtype_name(given.dtype) not in FLOATS:
            raise TypeError(f"decode_step: wx must be floating, got {dtype_name(given.dtype)}")
    name = dtype_name(state.dtype)
    work = dtype_name(compute_dtype(xp, cell.dtype))
    if name not in {dtype_name(cell.dtype), work}:
        wanted = " or ".join(sorted({dtype_name(cell.dtype), work}))
        raise TypeError(f"decode_step: the state must be {wanted}, got {name}")
    return xp, state


def _checked_table(xp: Namespace, table: Any, batch: int, pool: Array) -> Array:
    """The block table, checked where its numbers can be read without waiting for a device."""
    if isinstance(table, (list, tuple)):
        # As it was written first: to convert at once would round 0.5 down to state 0, and read True as state 1.
        numbers = np.asarray(table) if len(table) else np.empty(0, dtype=np.int64)
        if numbers.dtype.kind != "i":
            raise TypeError(f"decode_step: block_table must hold whole numbers, got {table}")
        table = xp.asarray(numbers.astype(np.int64), device=array_api_compat.device(pool))
    if not is_array(table) or dtype_name(table.dtype) not in ("int32", "int64"):
        got = dtype_name(table.dtype) if is_array(table) else type(table).__name__
        raise TypeError(f"decode_step: block_table must be int32 or int64, got {got}")
    if tuple(table.shape) != (batch,):
        raise ValueError(f"decode_step: block_table must have shape ({batch},), got {tuple(table.shape)}")
    if str(array_api_compat.device(table)) != str(array_api_compat.device(pool)):
        raise ValueError("decode_step: block_table must be on the device of the pool")
    if namespace_name(xp) not in ("numpy", "torch"):
        raise TypeError(
            f"decode_step: block_table writes into the pool, which {namespace_name(xp)} arrays do not allow; gather "
            "the rows, step, and put them back"
        )
    if str(array_api_compat.device(table)) == "cpu":
        named = [n for n in table.tolist() if n >= 0]
        if named and max(named) >= int(pool.shape[0]):
            raise ValueError(f"decode_step: block_table names state {max(named)} of a pool of {int(pool.shape[0])}")
        if len(set(named)) != len(named):
            raise ValueError(f"decode_step: two rows of block_table name the same state: {table.tolist()}")
    return table


def _check_out(what: str, xp: Namespace, out: Any, shape: tuple[int, ...], dtype: Any, like: Array) -> None:
    """Refuses what cannot be written in place."""
    if namespace_name(xp) not in ("numpy", "torch", "cupy"):
        raise TypeError(f"{what}: {namespace_name(xp)} arrays cannot be written in place; leave out= away")
    if not is_array(out) or array_api_compat.array_namespace(out) is not array_api_compat.array_namespace(like):
        raise TypeError(f"{what}: out must be an array like the input, got {type(out).__name__}")
    if tuple(out.shape) != shape or out.dtype != dtype:
        wanted = f"{dtype_name(dtype)} {shape}"
        raise ValueError(f"{what}: out must be {wanted}, got {dtype_name(out.dtype)} {tuple(out.shape)}")
    contiguous = out.flags.c_contiguous if hasattr(out, "flags") else out.is_contiguous()
    if not contiguous:
        raise ValueError(f"{what}: out must be contiguous")


def _rows_at(xp: Namespace, pool: Array, table: Array) -> Array:
    """The states of the rows; zeros, and not what stands in the pool, for rows without a request."""
    rows = xp.take(pool, xp.where(table < 0, xp.zeros_like(table), table), axis=0)
    there = xp.reshape(table >= 0, (-1,) + (1,) * (pool.ndim - 1))
    return xp.where(there, rows, xp.zeros_like(rows))


def _put_rows(pool: Array, table: Array, new: Array) -> None:
    keep = table >= 0
    pool[table[keep]] = new[keep]


def _step(xp: Namespace, cell: Any, state: Array, given: Array, projected: bool) -> Array:
    """f on arrays; given (B, 1, I), or the projection (B, 1, rows of W_x)."""
    work = compute_dtype(xp, cell.dtype)
    state, given = cast(xp, state, work), cast(xp, given, work)
    weight, bias = (cast(xp, a, work) for a in cell.W_x)
    params = cell.recurrent(xp, work)
    slots = [state] if cell.state_slots == 1 else [state[:, s, ...] for s in range(cell.state_slots)]
    batch = int(given.shape[0])
    if isinstance(cell, MixingCell):
        if not projected:
            gates = cell.gate_inputs(xp, given, weight, bias)
        elif type(cell).gate_inputs is MixingCell.gate_inputs:
            whole = xp.reshape(given, (batch, 1, len(cell.gates), cell.d_h))
            gates = [whole[:, :, g, :] for g in range(len(cell.gates))]
        else:
            raise TypeError(f"decode_step: {type(cell).__name__} reads its input in its own way; give x instead of wx")
        new = cell.step(xp, cell.mixer(xp, work), *slots, *(g[:, 0, ...] for g in gates), *params)
    else:
        made = given[:, 0, :] if projected else given[:, 0, :] @ xp.matrix_transpose(weight) + bias
        whole = xp.reshape(made, (batch, len(cell.gates), cell.d_h))
        new = cell.step(xp, *slots, *(whole[:, g, :] for g in range(len(cell.gates))), *params)
    return new[0] if len(new) == 1 else xp.stack(new, axis=1)
