"""The strongest plain alternative on NumPy: a time loop forward and back-propagation through time, per step vectorised
over B and D, with every shared subexpression of the cotangent computed once."""

from __future__ import annotations

import numpy as np

from pararnn import sequential_apply
from pararnn.graph import Program, compile_array, pullback
from pararnn.programs import programs_of


def forward(cell, x):
    return sequential_apply(cell, x)


def _step_pullback(cell):
    programs = programs_of(cell)
    graph = programs.graph
    mu = [f"u_{s}" for s in programs.slots]
    back = pullback(programs.new, [graph.input(m) for m in mu], [*programs.prev, *programs.leaves])
    names = [*programs.prev_names, *programs.gate_names, *mu, *programs.param_names]
    return compile_array(Program(names, back))


def forward_and_backward(cell, x, cotangent):
    """States, and gradients of x, W_x, b and the recurrent parameters."""
    xp = cell.xp
    batch, time, _ = x.shape
    width, size, gates = cell.d_h, cell.state_slots, len(cell.gates)
    states = forward(cell, x)
    step = _step_pullback(cell)
    weight, bias = cell.W_x
    pre = (x @ weight.T + bias).reshape(batch, time, gates, width)
    params = cell.recurrent(xp, x.dtype)
    d_pre = np.empty_like(pre)
    future = [np.zeros((batch, width), x.dtype)] * size
    sums = [np.zeros((batch, width), x.dtype) for _ in params]
    shaped = states.reshape(batch, time, size, width)
    given = cotangent.reshape(batch, time, size, width)
    first = np.zeros((batch, size, width), x.dtype)
    with np.errstate(all="ignore"):
        for t in range(time - 1, -1, -1):
            before = shaped[:, t - 1] if t else first
            mu = [given[:, t, s] + future[s] for s in range(size)]
            out = step(xp, *(before[:, s] for s in range(size)), *(pre[:, t, g] for g in range(gates)), *mu, *params)
            future = out[:size]
            for g in range(gates):
                d_pre[:, t, g] = out[size + g]
            for k in range(len(params)):
                sums[k] += out[size + gates + k]
    flat = d_pre.reshape(batch * time, gates * width)
    d_x = (flat @ weight).reshape(x.shape)
    d_weight = flat.T @ x.reshape(batch * time, -1)
    return states, d_x, d_weight, flat.sum(axis=0), [s.sum(axis=0) for s in sums]
